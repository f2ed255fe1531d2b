"""Test that each page links GLOSSARY.md, and that a reader meets no term unexplained: the first use
of a term on a page is a link, or is bold because the term is explained there."""
import re

import pytest
from helpers import ROOT

# LOG.md is for those who work on the code.
PAGES = [path for path in (ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md')))
         if path.stem not in ('GLOSSARY', 'LOG')]
# Terms that a newcomer cannot know. (F1 is not one of them, because FIGURES calls a figure F1.)
TERMS = ('tuned lens,logit lens,adapter,curriculum,healing,Muon,toy A,toy B,depth score,LIDAS,'
         'MIDAS,LN-scaling,KV cache,mixture of experts,torchrun,DDP,closed-book,nats,t-interval,'
         'resolved,cool-down,layer mode,Span,plain output,solver,anchored,prelude,coda,'
         'reasoning primitive,FLOPs,arm').split(',')


def anchors():
    "Return the anchors that GitHub makes of the headings of GLOSSARY.md."
    headings = re.findall(r'^#+ (.+)$', (ROOT / 'docs/GLOSSARY.md').read_text('utf-8'), re.M)
    return [re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings]


def test_glossary_has_each_term_once():
    assert len(anchors()) == len({*anchors()})
    assert {term.lower().replace(' ', '-') for term in TERMS} <= {*anchors()}


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.stem)
def test_first_use_of_a_term_is_explained(path):
    page = path.read_text('utf-8')
    assert 'GLOSSARY.md' in page
    assert {*re.findall(r'GLOSSARY\.md#([\w-]+)', page)} <= {*anchors()}
    # code, comments, pictures and headings do not count as a use
    text = re.sub(r'```.*?```|<!--.*?-->|<img.*?>|!\[[^]]*\]\([^)]*\)|`[^`\n]+`|^#[^\n]*', '', page,
                  flags=re.S | re.M)
    explained = [at.span() for at in re.finditer(r'\[[^]]*\]\([^)]+\)|\*\*[^*]+\*\*', text)]
    for term in TERMS:
        first = re.search(rf'\b{term}s?\b', text, 0 if term[0].isupper() else re.I)
        is_explained = first is None or any(a <= first.start() < b for a, b in explained)
        assert is_explained, f'{term}: ...{text[first.start() - 40:first.end() + 40]}...'
