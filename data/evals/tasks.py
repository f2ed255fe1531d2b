"""What the YAML files of this folder call: data that comes from here or from a local file, and a
score for free answers.

lm-eval reads the YAML files and imports this one by its path, so this file finds the repo itself.
"""
import json
import re
import string
import sys
from collections import Counter
from pathlib import Path

from datasets import Dataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.primitives import few_shot  # noqa: E402


def primitive(task, depth=0, shots=5, n=1000, **_):
    "The very examples that `nanodepth.py primitives` scores, their shots in the prompt."
    examples = few_shot(task, n, shots=shots, depth=depth)
    return {'test': Dataset.from_list([dict(prompt=e.prompt, options=e.options, answer=e.answer)
                                       for e in examples])}


def local(name, where):
    path = HERE / 'data' / name
    if not path.exists():
        raise FileNotFoundError(f'{path} is missing: put it there from {where}')
    return json.loads(path.read_text(encoding='utf-8'))


def plain(number):
    "3.0 as '3', 2.5 as '2.5'."
    return str(int(float(number))) if float(number) == int(float(number)) else str(number)


def fifteen_trees():
    "The one shot of \"Retrofitted Recurrence\", as its authors' code has it: gsm8k_cot's first."
    import lm_eval
    import yaml
    path = Path(lm_eval.__file__).parent / 'tasks/gsm8k/gsm8k-cot.yaml'
    return yaml.safe_load(path.read_text(encoding='utf-8'))['fewshot_config']['samples'][:1]


def mawps(name, **_):
    "One of MAWPS's sets, in the form of its authors: sQuestion and lSolutions."
    problems = local(f'{name}.json', 'the MAWPS repository (Koncel-Kedziorski et al., 2016)')
    return {'test': Dataset.from_list([dict(question=p['sQuestion'].strip(),
                                            answer=plain(p['lSolutions'][0])) for p in problems])}


def svamp(docs):
    return docs.map(lambda doc: dict(question=f'{doc["Body"].strip()} {doc["Question"].strip()}',
                                     answer=plain(doc['Answer'])))


def quac(**_):
    "Each question of a dialogue, after the ones before it with their answers."
    docs = []
    for article in local('val_v0.2.json', 'https://quac.ai (its validation file)')['data']:
        for paragraph in article['paragraphs']:
            history = ''
            for turn in paragraph['qas']:
                answers = [a['text'] for a in turn['answers']]
                docs.append(dict(context=paragraph['context'], history=history,
                                 question=turn['question'], answers=answers))
                history += f'Q: {turn["question"]}\nA: {turn["orig_answer"]["text"]}\n'
    return {'validation': Dataset.from_list(docs)}


def english(docs):
    "TyDi QA's English questions, with all their answers."
    docs = docs.filter(lambda doc: doc['id'].split('-')[0] == 'english')
    return docs.map(lambda doc: dict(all_answers=doc['answers']['text']))


# ------------------------------------------------------------------------------------- free answers

def words(text):
    "SQuAD's normal form: lower case, without punctuation and articles."
    text = ''.join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def f1(prediction, answer):
    prediction, answer = words(prediction), words(answer)
    same = sum((Counter(prediction) & Counter(answer)).values())
    if not prediction or not answer:
        return float(prediction == answer)
    return 2 * same / (len(prediction) + len(answer))


def free_answer(doc, results):
    "Exact match and F1 with the nearest of the answers."
    answers = doc.get('all_answers') or doc.get('answers')
    return dict(em=max(float(words(results[0]) == words(a)) for a in answers),
                f1=max(f1(results[0], a) for a in answers))
