from typing import Any


class Tokenizer:
    """A token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(character) for character in text]


def load_tokenizer(checkpoint: str, **options: Any) -> Tokenizer:
    return Tokenizer()


def load_processor(checkpoint: str, **options: Any) -> None:
    return None
