"""A tiny tokenizer, and short chat templates that are built as those of the model families are."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<|eom_id|>", "<|python_tag|>", "<start_of_turn>", "<end_of_turn>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MERGES = [("t", "o"), ("to", "o"), ("too", "l"), ('"', "n"), ("e", "s"), ("Ċ", "Ċ"), ("Ġ", "a")]
EOS = {"qwen_2_5": "<|im_end|>", "qwen_3": "<|im_end|>", "llama_3": "<|eot_id|>", "smollm_3": "<|im_end|>"}

CHATML_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCall them within <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}"""
CHATML_CALLS = """
{%- for call in message.tool_calls or [] %}{%- if not loop.first or content %}{{ '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"""
# Results that follow each other are one user message.
CHATML_RESULTS = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"""
CHATML_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"

QWEN_2_5 = (
    CHATML_TOOLS
    + """{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'tool' %}"""
    + CHATML_RESULTS
    + """{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}"""
    + CHATML_CALLS
    + """{%- endif %}{%- endfor %}"""
    + CHATML_PROMPT
)

# Thoughts of turns before the last user message are left out; so is an empty one, once a turn is followed.
QWEN_3 = (
    CHATML_TOOLS
    + """{%- set last = namespace(user=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'tool' %}"""
    + CHATML_RESULTS
    + """{%- else %}{%- set thought = '' %}{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- content }}"""
    + CHATML_CALLS
    + """{%- endif %}{%- endfor %}"""
    + CHATML_PROMPT
    + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
)

# One call a turn, without text beside it; the tools stand in the first user message.
LLAMA_3 = """{{- bos_token }}{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{- 'Respond with {"name": .., "parameters": ..}.\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# No tools and no system role, and user and assistant in turns.
GEMMA_3 = """{{- bos_token }}{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + (message.content | trim) }}
{{- '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Calls are left out of earlier turns, and each result is a user message of its own.
SMOLLM_3 = """{{- '<|im_start|>system\\nReasoning Mode: /no_think\\n' }}
{%- if tools %}{%- for tool in tools %}{{- (tool.function | string) + '\\n' }}{%- endfor %}
{{- 'Call them within <tool_call></tool_call>.\\n' }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>user\\n' + message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{%- endif %}"""

TEMPLATES = {
    "qwen_2_5": QWEN_2_5,
    "qwen_3": QWEN_3,
    "llama_3": LLAMA_3,
    "gemma_3": GEMMA_3,
    "smollm_3": SMOLLM_3,
}


def byte_tokenizer(template: str | None = None, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """A token for each byte, and some longer ones: most texts can be written in several ways."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos)
    made.chat_template = template
    return made


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    return byte_tokenizer(TEMPLATES[family], EOS.get(family, "<eos>"))
