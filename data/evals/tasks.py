"""What the YAML files of this folder call.

lm-eval reads the YAML files and imports this one by its path, so this file finds the repo itself.
"""
import sys
from pathlib import Path

from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.text.primitives import few_shot  # noqa: E402


def primitive(task, depth=0, shots=5, n=1000, **_):
    "The very examples that our own scorer asks, their shots in the prompt."
    examples = few_shot(task, n, shots=shots, depth=depth)
    return {'test': Dataset.from_list([dict(prompt=e.prompt, options=e.options, answer=e.answer)
                                       for e in examples])}


def plain(number):
    "3.0 as '3', 2.5 as '2.5'."
    return str(int(float(number))) if float(number) == int(float(number)) else str(number)


def fifteen_trees():
    "The one shot of \"Retrofitted Recurrence\", as its authors' code has it: gsm8k_cot's first."
    import lm_eval
    import yaml
    path = Path(lm_eval.__file__).parent / 'tasks/gsm8k/gsm8k-cot.yaml'
    return yaml.safe_load(path.read_text(encoding='utf-8'))['fewshot_config']['samples'][:1]


def svamp(docs):
    return docs.map(lambda doc: dict(question=f'{doc["Body"].strip()} {doc["Question"].strip()}',
                                     answer=plain(doc['Answer'])))
