"""Texts to ids as the harness's own Hugging Face model encodes them.

Names of special tokens in a text are such, for chat templates and tasks write them out. BOS begins
a text where the tokenizer's texts begin so, once: a text that already spells it gets no second.
"""

from ...errors import DataError
from ...train.data.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, text: str, *, bos: bool) -> list[int]:
    """The ids of a text.

    Args:
        tokenizer: the model's.
        text: any string.
        bos: begin with BOS, where texts of this tokenizer do.

    Raises:
        DataError: the text has no form in UTF-8, or in this tokenizer.
    """
    ids = tokenizer.encode(text, allow_special=True).tolist()
    if bos and tokenizer.adds_bos and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Context and continuation of one question.

    Both are encoded as one text, and the context's own number of ids is taken off its front, so
    that a word is cut into tokens as it would be in running text. Spaces at the context's end
    belong to the continuation then. An empty context is BOS alone.

    Where the border lies inside a token, so that nothing would be left to score, the continuation
    is encoded by itself.

    Returns:
        The ids of the context, at least one, and those of the continuation.

    Raises:
        DataError: see `encode`; or a continuation with text has no ids.
    """
    if not context:
        alone = encode(tokenizer, continuation, bos=False)
        if alone[:1] == [tokenizer.bos_id]:
            return alone[:1], alone[1:]
        return [tokenizer.bos_id], alone
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    before = encode(tokenizer, context, bos=True)
    after = encode(tokenizer, context + continuation, bos=True)[len(before) :]
    if not after and continuation:
        after = encode(tokenizer, continuation, bos=False)
        if not after:
            raise DataError(f"continuation {continuation!r}: the tokenizer gives it no ids")
    # A context of spaces alone, whose spaces went to the continuation, in a tokenizer without BOS.
    return before or [tokenizer.bos_id], after
