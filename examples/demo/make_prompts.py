"""Write the demo's prompts: `python examples/demo/make_prompts.py > examples/demo/prompts.jsonl`."""

from __future__ import annotations

import json
import random


def main(count: int = 4000, digits: int = 3, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        number = [rng.choice("0123456789") for _ in range(digits)]
        print(json.dumps({"prompt": "".join(number) + "=", "answer": "".join(sorted(number))}))


if __name__ == "__main__":
    main()
