"""Text -> tokens: a tokenizer is a tiktoken Encoding, or behaves like one.

The idea: tiktoken needs two things, one regular expression that cuts text into words, and a rank
for each token that says which pair of neighbours to merge first. Bytes are such a tokenizer without
merges; a byte-level BPE tokenizer.json (GPT-2's, cosmo2's, Llama 3's) holds both, if its steps are
put into one expression. And back: an Encoding can be written as such a file.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", Table 2: the tokenizer is cosmo2.
Here: the toy configs read bytes, which need no download and no training. What tiktoken cannot
represent (TinyLlama's kind) goes through the `tokenizers` package, behind the same names.

Usage:
    enc = get_tokenizer('bytes')  # or 'gpt2', a tokenizer.json, a folder with one, a run of ours
    assert enc.decode(enc.encode('depth')) == 'depth'
    print(enc.n_vocab)                          # 257: the bytes and an end-of-text token
"""
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from common.errors import Refused, nearest, refusing
from common.files import read_fields, read_json, reading, replace, write_json

END_OF_TEXT = '<|endoftext|>'
ODD = """Text -> tokens: bytes, words (12 of 345), [lists] and `code` that don't
	if x == 3141.59:\r\n    return 'ä東🙂'  # don't  """
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def token_type(n_vocab):
    "How a token is stored."
    return 'uint16' if n_vocab <= 2**16 else 'uint32'


@dataclass
class RunFile:
    "What a run.json says of a run's tokenizer: the name that get_tokenizer takes."
    tokenizer: str


class CannotRepresent(Refused):
    "A tokenizer that is not of tiktoken's kind."


def behind(name):
    """What a name stands for in the end: the path of a tokenizer.json (itself, its folder's, that
    of a run's tokenizer), else a name."""
    path = Path(name)
    path = path.parent if path.suffix == '.pt' else path
    if name == 'bytes':
        return name
    if (path / 'tokenizer.json').exists():
        return path / 'tokenizer.json'
    if (path / 'run.json').exists():
        with reading(path / 'run.json'):
            return behind(read_fields(RunFile, path / 'run.json').tokenizer)
    if on_hub(name):
        return behind(from_hub(name))
    return path if path.is_file() and path.name != 'run.json' else str(name)


def tokenizer_file(name):
    "The tokenizer.json behind a name, or None."
    found = behind(name)
    return found if isinstance(found, Path) else None


def get_tokenizer(name):
    """A tiktoken Encoding, or what behaves like one: encode, decode, n_vocab. `name` is 'bytes',
    one that tiktoken knows ('gpt2' and so on; it downloads them), a tokenizer.json, or a folder
    that has one: a Hugging Face checkpoint, a run of ours."""
    name = behind(name)
    if isinstance(name, Path):
        with reading(name):
            try:
                return from_tokenizer_json(name)
            except CannotRepresent as reason:
                return Foreign(name, reason)
    if name == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]',
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={END_OF_TEXT: 256})
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise Refused(f"tokenizer {name!r} is not known: allowed are 'bytes', a tokenizer.json or "
                      f'a folder with one, and {", ".join(known)}')
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:        # requests' errors are OSErrors
        raise Refused(f'tokenizer {name!r}: tiktoken could not download it '
                      f"({type(error).__name__}); without a network use 'bytes' or a "
                      'tokenizer.json') from None


def on_hub(name):
    "Is this owner/name, as on the Hugging Face hub, and nothing on this disk?"
    return re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None and not Path(name).exists()


def from_hub(name):
    "The local copy of a checkpoint on the hub, fetched if need be."
    parent = Path(name).parent
    near = nearest(name, [str(p) for p in parent.iterdir()] if parent.is_dir() else [])
    missing = f'there is no {name} here{near}; the Hugging Face hub'
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(name),
                                      allow_patterns=['*.json', '*.safetensors', '*.jinja']))
    except ImportError:
        raise Refused(f'{missing} was not asked for it, because huggingface_hub is not installed '
                      '(pip install huggingface_hub)') from None
    except Exception as error:      # each version of the package has names of its own
        raise Refused(f'{missing} did not give it either ({type(error).__name__}): on a machine '
                      'without a network, give the folder of a download') from None


def refuse_unknown(name, say=print):
    "Refuse a tokenizer that nothing here can open. A network may be missing only for now."
    if on_hub(name):
        try:
            from_hub(name)
        except Refused as error:
            say(f'the tokenizer is not at hand: {error}')
    elif isinstance(behind(name), Path) or name not in tiktoken.list_encoding_names():
        get_tokenizer(name)


def reads_alike(a, b):
    """Do two tokenizers give the same tokens? Their names say little: a folder may have moved, or
    be a copy in another form."""
    return a.n_vocab == b.n_vocab and a.encode(ODD) == b.encode(ODD)


def refuse_another_tokenizer(path, loader, own=None):
    "Data of another tokenizer is refused, also where its ids happen to fit. `own`: the run's name."
    name = loader.tokenizer
    if name != own and not reads_alike(get_tokenizer(path), get_tokenizer(name)):
        raise Refused(f'{loader.sets[0].folder} was made with the tokenizer {name!r}, which is not '
                      f'that of {path}: make it with --tokenizer={path}')


def start_of_document(tokenizer):
    "The tokens before a document: those of its tokenizer.json, else an end of text, if it has one."
    if starts := getattr(tokenizer, 'starts', []):
        return starts
    known = END_OF_TEXT in tokenizer.special_tokens_set
    return [tokenizer.encode_single_token(END_OF_TEXT)] if known else []


# characters; on some millions of blanks in a row tiktoken's regular expression runs out of stack
LONGEST = 100_000
BETWEEN_WORDS = re.compile(r'(?<=\S)(?= \w)|(?<=\S\n)(?=\S)')


def encode_document(tokenizer, text):
    """Encode text, special tokens as ordinary text. A long document is encoded in pieces, cut where
    every such tokenizer cuts: before a space or after a line break between two words. So its tokens
    are the same, if it has such places."""
    if len(text) <= LONGEST or isinstance(tokenizer, Foreign):
        return tokenizer.encode_ordinary(text)
    found, start = [], 0
    while start < len(text):
        end = start + LONGEST
        if end < len(text):
            cuts = [cut.start() for cut in BETWEEN_WORDS.finditer(text, end - 1000, end)]
            end = cuts[-1] if cuts else end
        found += tokenizer.encode_ordinary(text[start:end])
        start = end
    return found


def readable(tokenizer, tokens):
    "Tokens as text; a model may have more ids than its tokenizer, as padding."
    return tokenizer.decode([token for token in tokens if token < tokenizer.n_vocab])


def template_start(spec):
    "The special tokens that a tokenizer.json puts before a text."
    steps, found = spec.get('post_processor') or {}, []
    for step in steps.get('processors', [steps]):
        if step.get('type') == 'TemplateProcessing':
            for piece in step['single']:
                if 'Sequence' in piece:
                    break
                found += step['special_tokens'][piece['SpecialToken']['id']]['ids']
    return found


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
        self.name, self.n_vocab = path.parent.name, self.inner.get_vocab_size()
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


# ----------------------------------------------------------------------------------- tokenizer.json

def from_tokenizer_json(path):
    """A byte-level BPE tokenizer.json as a tiktoken Encoding: its pre-tokenizer must become one
    expression, and its merges must make new tokens in the order of their ids."""
    def need(holds, otherwise):
        if not holds:
            raise CannotRepresent(f'{path} {otherwise}')

    spec = read_json(path)
    bpe, to_bytes = spec.get('model', {}), {char: byte for byte, char in byte_alphabet().items()}
    special = {token['content']: token['id'] for token in spec.get('added_tokens', [])}
    words = ({token: i for token, i in bpe.get('vocab', {}).items() if token not in special}
             if bpe.get('merges') else {})
    need(bpe.get('type', 'BPE') == 'BPE' and spec.get('pre_tokenizer')
         and words.keys() >= to_bytes.keys() >= set(''.join(words)),
         'is not a byte-level BPE tokenizer, the only kind that tiktoken can represent')
    if normalizer := spec.get('normalizer'):
        need(False, f'normalizes text ({normalizer["type"]}) before it cuts it, as tiktoken cannot')
    ranks = {bytes(to_bytes[char] for char in word): i for word, i in words.items()}
    made = [words[merge.replace(' ', '') if isinstance(merge, str) else ''.join(merge)]
            for merge in bpe['merges']]
    need(made == sorted(made) and len(set(made)) + 256 == len(words),
         'has merges that do not make its tokens in the order of their ids, as tiktoken does')
    found = Encoding(path.parent.name or 'tokenizer',
                     pat_str=word_pattern(spec['pre_tokenizer'], path), mergeable_ranks=ranks,
                     special_tokens=special)
    found.starts = template_start(spec)
    need(found.decode(found.encode_ordinary(ODD)) == ODD,
         'has an expression that leaves out a part of a text, which tiktoken would lose')
    return found


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
    kinds, first, last = [step['type'] for step in steps], steps[0], steps[-1]
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


def copy_tokenizer(name, folder):
    "The files of a tokenizer that has files, into another folder. Returns whether it has."
    file, folder = tokenizer_file(name), Path(folder)
    if not file:
        return False
    if file.parent.resolve() != folder.resolve():
        for other in ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json',
                      'chat_template.jinja'):
            if (file.parent / other).exists():
                shutil.copy(file.parent / other, folder / other)
        shutil.copy(file, folder / 'tokenizer.json')
    return True


def keep_tokenizer(source, folder):
    "What says which tokenizer a checkpoint reads, beside another one that is made of it."
    about = (Path(source).parent if Path(source).is_file() else Path(source)) / 'run.json'
    has_files = copy_tokenizer(source, folder)
    if about.exists():
        shutil.copy(about, folder)
    elif not has_files:
        raise Refused(f'{source} does not say which tokenizer it reads: it has no tokenizer.json '
                      'and no run.json')


def write_tokenizer(name, folder, context):
    """The tokenizer of that name as files that transformers opens: its own, if it has them, or an
    Encoding written as one."""
    about = Path(folder) / 'tokenizer_config.json'
    if not copy_tokenizer(name, folder):
        spec = json.dumps(to_tokenizer_json(get_tokenizer(name)), ensure_ascii=False)
        replace(Path(folder) / 'tokenizer.json', spec.encode())
    if not about.exists():
        end = END_OF_TEXT if END_OF_TEXT in get_tokenizer(name).special_tokens_set else None
        write_json(about, dict(
            tokenizer_class='PreTrainedTokenizerFast', bos_token=end, eos_token=end,
            model_max_length=context, clean_up_tokenization_spaces=False))


def to_tokenizer_json(encoding):
    """An Encoding as a tokenizer.json. tiktoken keeps a rank for each token, the file wants the
    pair that makes it: that is what merging the token's bytes with the lower ranks alone leaves.
    Documents begin with an end of text, as ours do."""
    ranks, letters = encoding._mergeable_ranks, byte_alphabet()
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
    ends = [END_OF_TEXT] if END_OF_TEXT in known else []
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
