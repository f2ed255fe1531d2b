"""Text -> tokens. A tokenizer is a tiktoken Encoding, or behaves like one, and is asked for by a
name. tiktoken needs a regular expression that cuts text into words, and a rank for each token,
which says which pair of neighbours to merge first. Bytes are such a tokenizer without merges.
Usage: enc = get_tokenizer('bytes')         # or 'gpt2', a tokenizer.json, a folder with one, a run
"""
import hashlib
import json
import string
from pathlib import Path
from unittest import mock

import numpy as np
import tiktoken

from nanodepth.common.errors import Refused, as_refusal
from nanodepth.common.files import checkpoint_file, read_json, replace, write_json
from nanodepth.common.whose import file_of, on_hub
from nanodepth.model import require

END_OF_TEXT = '<|endoftext|>'
BESIDE = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json',
          'chat_template.jinja')
ODD = """Text -> tokens: bytes, words (12 of 345), [lists] and `code` that don't
	if x == 3141.59:\r\n    return 'ä東🙂'  # don't  """


def token_type(n_vocab):
    "How a token is stored."
    return 'uint16' if n_vocab <= 2**16 else 'uint32'


def encode_as_array(tokenizer, text, special):
    """The tokens of a text as they are stored; `special` are meant, where it names some. Of bytes
    each is a token already: no list of Python's integers is made of them."""
    if tokenizer.name == 'bytes' and not (special and END_OF_TEXT in text):
        tokens = np.frombuffer(text.encode(), 'uint8')
    elif special:
        tokens = tokenizer.encode(text, allowed_special='all')
    else:
        tokens = tokenizer.encode_ordinary(text)
    return np.asarray(tokens, token_type(tokenizer.n_vocab))


def stands_for(name):
    """What a name stands for: the path of a tokenizer.json, which a Hugging Face folder, a dataset
    and a run have, or a word that is one by itself."""
    if name == 'bytes':
        return name
    path = checkpoint_file(name).parent         # a folder, which may be named by its file
    if (path / 'tokenizer.json').exists():
        return path / 'tokenizer.json'
    if (path / 'run.json').exists():
        return str(read_json(path / 'run.json').get('tokenizer', name))
    if on_hub(name):
        return file_of(name, 'tokenizer.json') or str(name)
    return path if path.is_file() else str(name)


def tokenizer_file(name):
    "The tokenizer.json that a name stands for, or None."
    file = stands_for(name)
    return file if isinstance(file, Path) else None


def get_tokenizer(name):
    """A tiktoken Encoding, or what behaves like one: encode, decode, n_vocab. `name` is 'bytes',
    one that tiktoken knows ('gpt2' and so on; it downloads them), a tokenizer.json, or a folder
    that has one: a Hugging Face checkpoint, a run of ours."""
    word = stands_for(name)
    if isinstance(word, Path):
        return FromFile(word)
    if word == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]',
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={END_OF_TEXT: 256})
    # unknown, or not to be downloaded
    with as_refusal(ValueError, OSError, why=lambda error: f"tokenizer {word!r}: allowed are "
                  "'bytes', a tokenizer.json or a folder with one, and what tiktoken has "
                  f'({", ".join(tiktoken.list_encoding_names())}): {str(error).splitlines()[0]}'):
        return tiktoken.get_encoding(word)


class FromFile:
    "A tokenizer.json under tiktoken's names."

    def __init__(self, path):
        from tokenizers import Tokenizer
        self.inner = Tokenizer.from_file(str(path))
        self.inner.no_truncation()
        self.inner.no_padding()
        self.name = path.name
        self.n_vocab = max(self.inner.get_vocab().values()) + 1
        self.special_tokens_set = {token.content for token
                                   in self.inner.get_added_tokens_decoder().values()
                                   if token.special}
        framed = self.inner.encode('a')         # with what the file puts before and after a text
        self.starts = framed.ids[:framed.special_tokens_mask.index(0)]

    def encode(self, text, allowed_special=()):
        self.inner.encode_special_tokens = not allowed_special      # named so, it is plain text
        return self.inner.encode(text, add_special_tokens=False).ids

    encode_ordinary = encode

    def encode_single_token(self, token):
        return self.inner.token_to_id(token)

    def decode(self, tokens):
        return self.inner.decode(list(tokens), skip_special_tokens=False)


def as_tokenizers(encoding):
    """A tiktoken Encoding as a Tokenizer of the `tokenizers` package. A text begins with the end of
    the one before, as our documents do."""
    from tokenizers.processors import TemplateProcessing
    from transformers.convert_slow_tokenizer import TikTokenConverter
    special = encoding._special_tokens
    converter = TikTokenConverter(pattern=encoding._pat_str,
                                  extra_special_tokens=sorted(special, key=special.get))
    # it reads ranks from a file, which these have not
    with mock.patch('tiktoken.load.load_tiktoken_bpe', lambda _: encoding._mergeable_ranks):
        made = converter.converted()
    made.post_processor = TemplateProcessing(
        single=f'{END_OF_TEXT} $A', pair=f'{END_OF_TEXT} $A $B',
        special_tokens=[(END_OF_TEXT, special[END_OF_TEXT])])
    require(made.encode(ODD, add_special_tokens=False).ids == encoding.encode(ODD)
            and all(made.token_to_id(token) == i for token, i in special.items()),
            f'the tokenizer {encoding.name} would give other tokens as a tokenizer.json')
    return made


def fingerprint(tokenizer):
    """What tells a tokenizer from others, whatever it is called: its size, and how it cuts some odd
    texts. Names say little: a folder may have moved, or hold another tokenizer by now."""
    texts = ODD, string.printable, ''.join(map(chr, range(0xa0, 0x250)))
    ids = [tokenizer.encode(text, allowed_special='all') for text in texts]
    return hashlib.sha256(json.dumps([tokenizer.n_vocab, ids]).encode()).hexdigest()[:16]


def refuse_another_tokenizer(path, loader):
    "Data of another tokenizer than a model's is refused, also where its ids happen to fit."
    own = fingerprint(get_tokenizer(path))
    for each in loader.datasets:
        if each.about['fingerprint'] != own:
            raise Refused(f'{each.folder} was made with the tokenizer {each.about["tokenizer"]!r}, '
                          f'which is not that of {path}: make it with --tokenizer={path}')


def start_of_document(tokenizer):
    "The tokens before a document: those of its tokenizer.json, else an end of text, if it has one."
    if starts := getattr(tokenizer, 'starts', []):
        return starts
    known = END_OF_TEXT in tokenizer.special_tokens_set
    return [tokenizer.encode_single_token(END_OF_TEXT)] if known else []


def readable(tokenizer, tokens):
    "Tokens as text; a model may have more ids than its tokenizer, as padding."
    return tokenizer.decode([token for token in tokens if token < tokenizer.n_vocab])


def generation_of(name):
    """What stands beside a tokenizer of how text is generated, such as the tokens that end it: as
    transformers reads it, by config.json where there is no other file."""
    return beside(name, 'generation_config.json') or beside(name, 'config.json')


def beside(name, file):
    "A JSON file that stands beside a tokenizer, read, or {}."
    path = tokenizer_file(name)
    return read_json(path.with_name(file)) if path and path.with_name(file).exists() else {}


def marks_of(name, tokenizer):
    "The tokens by which a text begins and ends, as far as a name's tokenizer has such."
    config, tokens = beside(name, 'tokenizer_config.json'), []
    for mark in ('bos_token', 'eos_token'):
        token = config.get(mark)
        token = token.get('content') if isinstance(token, dict) else token
        tokens.append(tokenizer.encode_single_token(token)
                      if token in tokenizer.special_tokens_set else None)
    return tokens


def copy_tokenizer(name, folder):
    "The files of a tokenizer that has files, into another folder; returns whether it has."
    file, folder = tokenizer_file(name), Path(folder)
    if file is None or file.parent.resolve() == folder.resolve():
        return file is not None
    replace(folder / 'tokenizer.json', file.read_bytes())
    if file.name == 'tokenizer.json':       # else what stands beside it may be of another one
        for other in BESIDE:
            if file.with_name(other).exists():
                replace(folder / other, file.with_name(other).read_bytes())
        if not file.with_name('generation_config.json').exists():
            asks = generation_of(file)
            ids = {mark: asks[mark] for mark in ('bos_token_id', 'eos_token_id', 'pad_token_id')
                   if asks.get(mark) is not None}
            if ids:
                write_json(folder / 'generation_config.json', ids)
    return True


def keep_tokenizer(source, folder):
    "What says which tokenizer a checkpoint reads, beside another one that is made of it."
    run_file = checkpoint_file(source).with_name('run.json')
    has_files = copy_tokenizer(source, folder)
    if run_file.exists():
        replace(Path(folder) / 'run.json', run_file.read_bytes())
    elif not has_files:
        raise Refused(f'{source} does not say which tokenizer it reads: it has no tokenizer.json '
                      'and no run.json')


def write_tokenizer(name, folder, context):
    """The tokenizer of that name as files that transformers opens: its own, if it has them, or an
    Encoding written as one."""
    has_files, config = copy_tokenizer(name, folder), Path(folder) / 'tokenizer_config.json'
    is_whole = config.exists()
    if not is_whole:
        from transformers import PreTrainedTokenizerFast
        own = get_tokenizer(name)
        end = END_OF_TEXT if END_OF_TEXT in own.special_tokens_set else None
        PreTrainedTokenizerFast(tokenizer_object=own.inner if has_files else as_tokenizers(own),
                                bos_token=end, eos_token=end, model_max_length=context,
                                clean_up_tokenization_spaces=False).save_pretrained(folder)
    if not is_whole or checkpoint_file(name).exists():
        # a run has read tokenizer.json, of which other classes, or code, change the rules.
        # (transformers 4 knows this one by no other name, and gives more than its models take.)
        settings = read_json(config) | dict(tokenizer_class='PreTrainedTokenizerFast',
                                            model_input_names=['input_ids', 'attention_mask'])
        settings.pop('auto_map', None)
        write_json(config, settings)
