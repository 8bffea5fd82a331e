"""What a check may say, beside whether it passed."""


class NotRunError(Exception):
    """This machine lacks what the check needs; the text says what."""
