"""Reading and comparing answers: tables made by hand."""

from fractions import Fraction

import pytest

from tba.tasks.gsm8k import Number, equal_answers, given_answer, marked_answer


def value_of(text):
    number = given_answer(text)
    return None if number is None else number.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # the last number, with what people write around it
        ("She sold 48 in April and 24 in May, so 72.", 72),
        ("so she has 1,080 stamps", 1080),
        ("It costs $1,234,567.00!", 1234567),
        ("a lakh is 1,00,000", 100000),
        ("choose from 1, 2, 3", 3),
        ("The total is **$72**.", 72),
        ("USD 15 or €15", 15),
        ("It is 25% of them", 25),
        ("They drove 60km/h", 60),
        ("The garden has 50 m^2.", 50),
        ("The garden has 50 m².", 50),
        ("half of them: .5", Fraction(1, 2)),
        ("3.14 litres", Fraction(157, 50)),
        ("`72`", 72),
        ("48/2 = <<48/2=24>>24 clips", 24),
        # signs
        ("it fell to -7 degrees", -7),
        ("his balance is -$5", -5),
        ("his balance is $-5", -5),
        ("his balance is \N{MINUS SIGN}5", -5),
        ("48-24", 24),
        ("$48-$24", 24),
        ("(48)-24", 24),
        ("10-15", 15),
        ("48 - 24", 24),
        # fractions
        ("she ate 3/4 of it", Fraction(3, 4)),
        ("she ate 2 1/2 pies", Fraction(5, 2)),
        ("-1/2", Fraction(-1, 2)),
        (r"she ate $\frac{3}{4}$", Fraction(3, 4)),
        (r"she ate $1\dfrac{3}{4}$", Fraction(7, 4)),
        ("$72/hour", 72),
        # the marker wins
        ("#### 72", 72),
        ("####72", 72),
        ("#### 72.", 72),
        ("#### 1,080 clips in 2 months", 1080),
        ("#### 3\nno, again\n#### 4\nbecause 2 + 2 = 4, not 3", 4),
        ("#### **$-72.50** per day, 7 days", Fraction(-145, 2)),
        ("####\n72\nI checked it 2 times", 72),
        ("#### 3/4 of 8", Fraction(3, 4)),
        (r"\boxed{5} so #### \boxed{6} or 7", 6),
        ("#### Step 2: add them\n48 + 24 = 72", 72),
        ("#### Answer: 72", 72),
        # so does the box
        (r"\boxed{72} and 3 more words", 72),
        (r"\boxed{1} then \boxed{1{,}080\text{ m}^2} in 3 days", 1080),
        (r"\boxed{\frac{3}{4}} of 8", Fraction(3, 4)),
        (r"\boxed{x = \$72} 5", 72),
        (r"72 is \boxed{unknown}", 72),
        (r"\boxed{72", 72),
        # the last side of an equation
        ("#### 48+24=72", 72),
        ("#### 48 + 24 = $72 in 2 months", 72),
        ("#### x = - 5", -5),
        ("#### Total = 48 + 24 = 72", 72),
        ("#### Step 2: 48 + 24 = 72", 72),
        ("#### 72 = the total", 72),
        ("#### 72 = 48 + 24", 72),
        ("#### 72\n(70 = 35 * 2)", 72),
        (r"\boxed{2 \times 36 = 72}", 72),
        (r"\boxed{48 \text{ clips} + 24 \text{ clips} = 72 \text{ clips}}", 72),
        (r"\boxed{x = -5}", -5),
        # what follows the number is a remark
        ("#### 72 (48+24)", 72),
        ("#### 72 + tax", 72),
        ("#### 72 - that is all", 72),
        ("#### 72 or 73", 72),
        (r"\boxed{72, 73}", 72),
        ("#### 72 dollars and 0 cents", 72),
        ("it costs 72 dollars and 5 cents", Fraction(1441, 20)),
        # what is not worked out is no answer
        ("#### 48+24", None),
        ("#### 48 + 24", None),
        ("#### $48 - $24", None),
        (r"\boxed{2 \times 36}", None),
        (r"\boxed{48 + 24 = 2 \cdot 36}", None),
        ("#### 3 x 24", None),
        ("#### 5-6", None),
        # signs with a space, a fraction or a currency between
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        (r"\boxed{-\frac12}", Fraction(-1, 2)),
        (r"#### -\dfrac{1}{2}", Fraction(-1, 2)),
        (r"it is $-\frac{1}{2}$", Fraction(-1, 2)),
        ("#### - 5", -5),
        ("#### **- 5**", -5),
        ("#### $-5$", -5),
        (r"#### \$-5", -5),
        (r"#### -\$5", -5),
        (r"#### \(-5\)", -5),
        (r"\boxed{- 5}", -5),
        (r"\boxed{\text{-5}}", -5),
        ("10 - 15 = - 5", -5),
        ("48 apples - 24 apples", 24),
        ("She has:\n- 5 apples", 5),
        # fractions and powers
        (r"\boxed{\frac12}", Fraction(1, 2)),
        (r"\boxed{\frac 12}", Fraction(1, 2)),
        (r"\boxed{\frac{12}5}", Fraction(12, 5)),
        (r"\boxed{1\frac12}", Fraction(3, 2)),
        (r"\boxed{-1 \frac{1}{2}}", Fraction(-3, 2)),
        ("10^2", 100),
        ("#### 10^2", 100),
        (r"\boxed{10^{2}}", 100),
        (r"\boxed{2^{-1}}", Fraction(1, 2)),
        (r"5 \times 10^3 people", 5000),
        (r"\boxed{1.5 \times 10^{-1}}", Fraction(3, 20)),
        ("#### 50 m^2", 50),
        (r"\boxed{50\text{ m}^2}", 50),
        (r"\boxed{25\%}", 25),
        ("#### 72..", 72),
        ("#### 1,080.", 1080),
        ("#### __72__", 72),
        # no number
        ("10^99999999999", None),
        ("0^{-1}", None),
        ("", None),
        ("I do not know.", None),
        ("#### none", None),
        ("5/0", None),
        ("9" * 5000, None),
        (f"{'9' * 5000}/{'9' * 5000}", None),
    ],
)
def test_the_answer_is_read_as_a_person_would(text, value):
    assert value_of(text) == value


def test_only_a_marked_number_is_the_answer_of_a_row():
    assert marked_answer("48 + 24 = 72\n#### 1,080") == Number(Fraction(1080), is_decimal=False)
    assert marked_answer("48 + 24 = 72") is None
    assert marked_answer("48 + 24 = 72\n####") is None


@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        ("72.00", "72", True),
        ("72.5", "72", False),
        ("3/4", "0.75", True),
        ("6/8", "3/4", True),
        ("0.333333", "1/3", True),  # 1/3 - 0.333333 = 3.3e-7
        ("0.33333", "1/3", False),  # 3.3e-6
        ("1000/1001", "1001/1002", False),  # 1e-6 apart, but neither is rounded
        ("-3", "3", False),
        ("9007199254740993", "9007199254740992", False),  # the same as floats
        ("no number", "3", False),
    ],
)
def test_answers_are_equal_as_numbers(given, wanted, equal):
    assert equal_answers(given_answer(given), given_answer(wanted)) is equal


def test_long_babble_is_read_in_no_time():
    for babble in (
        "9,999" * 5000,
        "1 " * 20_000,
        "#" * 20_000,
        "####" + "-" * 20_000,
        r"\frac{" * 5000,
        "^{" * 5000,
        "- " * 10_000,
        "####" + "=" * 20_000,
        "1 * " * 10_000,
        "10^" * 10_000,
        "####1" + "$" * 20_000,
    ):
        given_answer(babble)
