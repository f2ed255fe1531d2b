"""tokenizer.json, the form in which Hugging Face keeps a tokenizer: in and out.

The idea: a byte-level BPE tokenizer (GPT-2's, cosmo2's, Llama 3's) is a regular expression that
cuts text into words, and a rank for each token. Such a file becomes a tiktoken Encoding, if its
steps can be put into one expression; an Encoding can be written as such a file. What tiktoken
cannot represent (TinyLlama's kind) goes through the `tokenizers` package, behind the same names.

Usage:
    get_tokenizer('TinyLlama/tokenizer.json')   # data/tokenizer.py asks for it
    spec = to_tokenizer_json(get_tokenizer('bytes'))
"""
import tiktoken

from common.errors import Refused, refusing
from common.files import read_json

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class CannotRepresent(Refused):
    "A tokenizer that is not of tiktoken's kind."


def from_tokenizer_json(path, sample):
    """A byte-level BPE tokenizer.json as a tiktoken Encoding: its pre-tokenizer must become one
    expression, its merges must make new tokens in the order of their ids, and the text `sample`
    must come through whole."""
    def need(holds, otherwise):
        if not holds:
            raise CannotRepresent(f'{path} {otherwise}')

    spec = read_json(path)
    bpe = spec.get('model', {})
    to_bytes = {char: byte for byte, char in byte_alphabet().items()}
    special = {token['content']: token['id'] for token in spec.get('added_tokens', [])}
    words = ({token: i for token, i in bpe.get('vocab', {}).items() if token not in special}
             if bpe.get('merges') else {})
    need(bpe.get('type', 'BPE') == 'BPE' and spec.get('pre_tokenizer')
         and words.keys() >= to_bytes.keys() >= set(''.join(words)),
         'is not a byte-level BPE tokenizer, the only kind that tiktoken can represent')
    if normalizer := spec.get('normalizer'):
        raise CannotRepresent(f'{path} normalizes text ({normalizer["type"]}) before it cuts it, '
                              'as tiktoken cannot')
    ranks = {bytes(to_bytes[char] for char in word): i for word, i in words.items()}
    made = [words[merge.replace(' ', '') if isinstance(merge, str) else ''.join(merge)]
            for merge in bpe['merges']]
    need(made == sorted(made) and len(set(made)) + 256 == len(words),
         'has merges that do not make its tokens in the order of their ids, as tiktoken does')
    encoding = Encoding(path.parent.name or 'tokenizer',
                        pat_str=word_pattern(spec['pre_tokenizer'], path), mergeable_ranks=ranks,
                        special_tokens=special)
    encoding.starts = template_start(spec)
    need(encoding.decode(encoding.encode_ordinary(sample)) == sample,
         'has an expression that leaves out a part of a text, which tiktoken would lose')
    return encoding


class Encoding(tiktoken.Encoding):
    "tiktoken's, with a stranger's expression, which may run out of its patience with a text."

    def encode(self, text, **options):
        with refusing(ValueError, why=lambda error: f'tokenizer {self.name}: {error}'):
            return super().encode(text, **options)

    def encode_ordinary(self, text):
        with refusing(ValueError, why=lambda error: f'tokenizer {self.name}: {error}'):
            return super().encode_ordinary(text)


def byte_alphabet():
    """GPT-2's printable character for each byte: itself where it prints, else the next one free
    from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {**{b: chr(b) for b in prints}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def word_pattern(pre_tokenizer, path):
    "The pre-tokenizer's steps as one regular expression."
    steps = pre_tokenizer.get('pretokenizers', [pre_tokenizer])
    kinds = [step['type'] for step in steps]
    first = steps[0]
    last = steps[-1]
    if kinds[-1] == 'ByteLevel' and not last.get('add_prefix_space'):
        by_words = last.get('use_regex', True)
        if kinds == ['ByteLevel'] and by_words:
            return GPT2_WORDS
        if kinds == ['Digits', 'ByteLevel'] and by_words:
            # Digits are cut off first, and each piece is then cut by GPT-2's pattern on its own. So
            # a number takes no space along, and white space before one ends its piece, where
            # \s+(?!\S) takes all of it.
            digits = r'\p{N}' if first.get('individual_digits') else r'\p{N}+'
            words = GPT2_WORDS.replace(r' ?\p{N}+', digits)
            return words.replace(r'|\s+(?!\S)', r'|\s+(?=\p{N})|\s+(?!\S)')
        if (kinds == ['Split', 'ByteLevel'] and not by_words and not first.get('invert')
                and first['behavior'] == 'Isolated' and 'Regex' in first['pattern']):
            return first['pattern']['Regex']
    raise CannotRepresent(f'{path} cuts text by {" then ".join(kinds)}, which is not one of the '
                          'forms that become one pattern')


def to_tokenizer_json(encoding, start='<|endoftext|>'):
    """An Encoding as a tokenizer.json. tiktoken keeps a rank for each token, the file wants the
    pair that makes it: that is what merging the token's bytes with the lower ranks alone leaves.
    Documents begin with the token `start`, as ours do."""
    ranks = encoding._mergeable_ranks
    letters = byte_alphabet()
    spell = lambda token: ''.join(letters[byte] for byte in token)      # noqa: E731
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            first = min(range(len(parts) - 1),
                        key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append([spell(parts[0]), spell(parts[1])])
    plain = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=False)
    cut = dict(type='Split', pattern=dict(Regex=encoding._pat_str), behavior='Isolated',
               invert=False)
    known = encoding._special_tokens
    ends = [start] if start in known else []
    first = [dict(SpecialToken=dict(id=name, type_id=0)) for name in ends]
    special = {name: dict(id=name, ids=[known[name]], tokens=[name]) for name in ends}
    a, b = (dict(Sequence=dict(id=which, type_id=0)) for which in 'AB')
    return dict(
        version='1.0', truncation=None, padding=None, normalizer=None,
        added_tokens=[dict(id=i, content=name, single_word=False, lstrip=False, rstrip=False,
                           normalized=False, special=True)
                      for name, i in sorted(known.items(), key=lambda item: item[1])],
        pre_tokenizer=dict(type='Sequence', pretokenizers=[cut, plain]),
        post_processor=dict(type='TemplateProcessing', single=[*first, a], pair=[*first, a, b],
                            special_tokens=special),
        decoder=plain,
        model=dict(type='BPE', dropout=None, unk_token=None, continuing_subword_prefix=None,
                   end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                   ignore_merges=False, vocab={spell(t): i for t, i in ranks.items()},
                   merges=merges))


def template_start(spec):
    "The special tokens that a tokenizer.json puts before a text."
    steps = spec.get('post_processor') or {}
    starts = []
    for step in steps.get('processors', [steps]):
        if step.get('type') == 'TemplateProcessing':
            for piece in step['single']:
                if 'Sequence' in piece:
                    break
                starts += step['special_tokens'][piece['SpecialToken']['id']]['ids']
    return starts


class Foreign:
    """A tokenizer.json that tiktoken cannot represent, read by the `tokenizers` package, under
    tiktoken's names."""

    def __init__(self, path, reason):
        try:
            from tokenizers import Tokenizer
            self.inner = Tokenizer.from_file(str(path))
        except ImportError:
            raise Refused(f'{reason}; the tokenizers package can read it '
                          '(pip install tokenizers)') from None
        except Exception as error:      # the package raises a bare Exception
            raise Refused(f'{reason}; the tokenizers package cannot read it either: '
                          f'{error}') from None
        spec = read_json(path)
        self.name = path.parent.name
        self.n_vocab = self.inner.get_vocab_size()
        self.starts = template_start(spec)
        self.special_tokens_set = {token['content'] for token in spec.get('added_tokens', [])
                                   if token.get('special')}

    def encode(self, text, allowed_special=None):
        try:
            return self.inner.encode(text, add_special_tokens=False).ids
        except BaseException as error:      # a bare Exception; and a panic in Rust is not even that
            if not (isinstance(error, Exception) or type(error).__name__ == 'PanicException'):
                raise
            raise Refused(f'tokenizer {self.name}: {error}') from None

    encode_ordinary = encode

    def encode_single_token(self, token):
        return self.inner.token_to_id(token)

    def decode(self, tokens):
        return self.inner.decode(list(tokens), skip_special_tokens=False)
