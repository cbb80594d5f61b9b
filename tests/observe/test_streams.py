"""Output whose reader is gone is dropped, and nothing else changes."""

import io
import subprocess
import sys
import tempfile

from tba.observe.files import LastingStream, lasting


def test_a_stream_whose_reader_is_gone_swallows_what_is_written():
    """A pipe without a reader, as after `| head -1`: the exit status is 0 and nothing is said about it at the end."""
    code = (
        "import sys; from tba.observe.files import lasting_output\n"
        "with lasting_output():\n"
        "    for _ in range(3): print('x' * 100_000); print('y', file=sys.stderr)\n"
        "    print('last')\n"
        "open(sys.argv[1], 'w').write('reached')"
    )
    with tempfile.NamedTemporaryFile() as reached:
        process = subprocess.Popen(
            [sys.executable, "-c", code, reached.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.close()
        process.stderr.close()
        assert process.wait(60) == 0
        assert reached.read() == b"reached"


def test_a_stream_that_works_is_passed_through():
    text = io.StringIO()
    stream = lasting(text)
    assert stream.write("abc") == 3
    stream.flush()
    assert text.getvalue() == "abc"
    assert not stream.isatty()
    assert lasting(stream) is stream


def test_a_closed_stream_is_given_up():
    text = io.StringIO()
    text.close()
    stream = LastingStream(text)
    assert stream.write("abc") == 3
    assert stream.gone
