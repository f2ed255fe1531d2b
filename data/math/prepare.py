"""Mathematics: the cool-down mixtures of the two papers on growing, and the training mixtures of
"Retrofitted Recurrence". Each becomes data/math/MIXTURE. The hub asks you to accept the terms of
the SFT sets first.
    python data/math/prepare.py nemotron_20 --tokens=31.5B
    python data/math/prepare.py retrofit_math --tokens=50B --tokenizer=TinyLlama-1.1B
"""
import dataclasses
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth import ROOT  # noqa: E402
from nanodepth.common.errors import refusals  # noqa: E402
from nanodepth.text.tokens import Source, prepare  # noqa: E402

NEMOTRON = Source('nemotron_cc_math', 1.0, 'nvidia/Nemotron-CC-Math-v1', '4plus/*.parquet')
FINEMATH = Source('finemath', 1.0, 'HuggingFaceTB/finemath', 'finemath-4plus/*.parquet')
OPEN_WEB_MATH = Source('open_web_math', 1.0, 'open-web-math/open-web-math', 'data/*.parquet')
FINEWEB = Source('fineweb_edu', 1.0, 'HuggingFaceTB/smollm-corpus', 'fineweb-edu-dedup/*.parquet')
SFT = 'nvidia/Nemotron-Pretraining-SFT-v1'
SFT_MATH = Source('nemotron_sft_math', 1.0, SFT, '*M[Aa][Tt][Hh]/*.parquet', read='chat')
SFT_GENERAL = Source('nemotron_sft_general', 1.0, SFT, '*General/*.parquet', read='chat')


def cooldown(math, share=0.2):
    """SmolLM's mixture with this share of mathematics, the rest as it was among itself. ("From
    Growing to Looping" gives the 20%, but not what shrinks.)"""
    smollm = runpy.run_path(str(ROOT / 'data/smollm/prepare.py'))['SMOLLM']
    others = [source for source in smollm if source.name != 'open_web_math']
    whole = sum(source.share for source in others)
    return [*(dataclasses.replace(source, share=source.share / whole * (1 - share))
              for source in others), dataclasses.replace(math, share=share)]


MIXTURES = dict(
    nemotron_20=cooldown(NEMOTRON),     # in OpenWebMath's place (Growing to Looping, section 5.2)
    finemath_20=cooldown(FINEMATH),     # ... or FineMath-4+ (appendix C.4)
    open_web_math=[OPEN_WEB_MATH],      # "math cooldown" in Table 1 of "Do Depth-Grown Models ...?"
    retrofit_math=[NEMOTRON],           # Retrofitted Recurrence, section 4.3
    retrofit_heal=[FINEWEB],            # the first phase of section 4.4
    retrofit_mix=[FINEWEB, SFT_GENERAL, SFT_MATH])      # the second, in even shares

if __name__ == '__main__':
    with refusals('prepare.py'):
        prepare(MIXTURES, out=Path('data/math'))
