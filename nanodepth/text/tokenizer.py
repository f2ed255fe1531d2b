"""Turn text into tokens. A tokenizer is a tiktoken Encoding, or an object with the same methods,
and get_tokenizer finds it by a name. tiktoken needs a regular expression that cuts text into words,
and a rank for each token, which decides the pair of neighbours that is merged first. The tokenizer
'bytes' has no merges. Usage: enc = get_tokenizer('bytes')         # or 'gpt2', a tokenizer.json, a
folder with one, a run
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
from nanodepth.common.origin import file_of, on_hub
from nanodepth.model import require

END_OF_TEXT = '<|endoftext|>'
BESIDE = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json',
          'chat_template.jinja')
ODD = """Text -> tokens: bytes, words (12 of 345), [lists] and `code` that don't
	if x == 3141.59:\r\n    return 'ä東🙂'  # don't  """


def token_type(n_vocab):
    "Return the type in which tokens are stored."
    return 'uint16' if n_vocab <= 2**16 else 'uint32'


def encode_as_array(tokenizer, text, special):
    """Return the tokens of a text in the type in which they are stored. With `special`, names of
    special tokens in the text become these tokens. (For 'bytes' no list of Python's integers is
    made.)"""
    if tokenizer.name == 'bytes' and not (special and END_OF_TEXT in text):
        tokens = np.frombuffer(text.encode(), 'uint8')
    elif special:
        tokens = tokenizer.encode(text, allowed_special='all')
    else:
        tokens = tokenizer.encode_ordinary(text)
    return np.asarray(tokens, token_type(tokenizer.n_vocab))


def stands_for(name):
    """Return what the name of a tokenizer stands for: the path of a tokenizer.json, if the name is
    a folder that has one (a Hugging Face folder, a dataset, a run), or otherwise a word such as
    'bytes' or 'gpt2'."""
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
    "Return the tokenizer.json that a name stands for, or None."
    file = stands_for(name)
    return file if isinstance(file, Path) else None


def get_tokenizer(name):
    """Return a tiktoken Encoding, or an object with the same encode, decode and n_vocab. `name` is
    'bytes', a name that tiktoken knows (such as 'gpt2', which it downloads), a tokenizer.json, or a
    folder that has one, such as a Hugging Face checkpoint or a run."""
    word = stands_for(name)
    if isinstance(word, Path):
        return FromFile(word)
    if word == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]',
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={END_OF_TEXT: 256})
    with as_refusal(ValueError, OSError, why=lambda error: f"tokenizer {word!r} must be "
                  "'bytes', a tokenizer.json or a folder with one, or a name of tiktoken's "
                  f'({", ".join(tiktoken.list_encoding_names())}): {str(error).splitlines()[0]}'):
        return tiktoken.get_encoding(word)


class FromFile:
    "A tokenizer.json with the methods of a tiktoken Encoding."

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
        framed = self.inner.encode('a')         # with the tokens that the file puts around a text
        self.starts = framed.ids[:framed.special_tokens_mask.index(0)]

    def encode(self, text, allowed_special=()):
        self.inner.encode_special_tokens = not allowed_special      # True: as plain text
        return self.inner.encode(text, add_special_tokens=False).ids

    encode_ordinary = encode

    def encode_single_token(self, token):
        return self.inner.token_to_id(token)

    def decode(self, tokens):
        return self.inner.decode(list(tokens), skip_special_tokens=False)


def as_tokenizers(encoding):
    """Return a tiktoken Encoding as a Tokenizer of the `tokenizers` package. It begins a text with
    the token that ends a text, as in our datasets."""
    from tokenizers.processors import TemplateProcessing
    from transformers.convert_slow_tokenizer import TikTokenConverter
    special = encoding._special_tokens
    converter = TikTokenConverter(pattern=encoding._pat_str,
                                  extra_special_tokens=sorted(special, key=special.get))
    # the converter reads ranks from a file, which an Encoding does not have
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
    """Return a hash that tells a tokenizer from others: of its size, and of how it cuts some odd
    texts. (A name would not do, because a folder may have moved, or have another tokenizer now.)"""
    texts = ODD, string.printable, ''.join(map(chr, range(0xa0, 0x250)))
    ids = [tokenizer.encode(text, allowed_special='all') for text in texts]
    return hashlib.sha256(json.dumps([tokenizer.n_vocab, ids]).encode()).hexdigest()[:16]


def refuse_another_tokenizer(path, loader):
    "Refuse data that were made with another tokenizer than a model's, even if the ids fit."
    of_model = fingerprint(get_tokenizer(path))
    for dataset in loader.datasets:
        if dataset.about['fingerprint'] != of_model:
            raise Refused(f'{dataset.folder} was made with another tokenizer '
                          f'({dataset.about["tokenizer"]!r}) than {path} has: make it with '
                          f'--tokenizer={path}')


def start_of_document(tokenizer):
    """Return the tokens that begin a document: those that the tokenizer.json sets, or otherwise the
    token that ends a text, if the tokenizer has one."""
    if starts := getattr(tokenizer, 'starts', []):
        return starts
    known = END_OF_TEXT in tokenizer.special_tokens_set
    return [tokenizer.encode_single_token(END_OF_TEXT)] if known else []


def readable(tokenizer, tokens):
    "Return tokens as text. (A model may have more ids than its tokenizer, as padding.)"
    return tokenizer.decode([token for token in tokens if token < tokenizer.n_vocab])


def generation_of(name):
    """Return the settings of generation next to a tokenizer, such as the tokens that end a text:
    from generation_config.json or, as in transformers, otherwise from config.json."""
    return json_next_to(name, 'generation_config.json') or json_next_to(name, 'config.json')


def json_next_to(name, file):
    "Return what a JSON file next to a tokenizer holds, or {} if there is no such file."
    path = tokenizer_file(name)
    return read_json(path.with_name(file)) if path and path.with_name(file).exists() else {}


def bos_and_eos_of(name, tokenizer):
    "Return the tokens that begin and end a text, each None if the tokenizer has no such token."
    config, tokens = json_next_to(name, 'tokenizer_config.json'), []
    for mark in ('bos_token', 'eos_token'):
        token = config.get(mark)
        token = token.get('content') if isinstance(token, dict) else token
        tokens.append(tokenizer.encode_single_token(token)
                      if token in tokenizer.special_tokens_set else None)
    return tokens


def copy_tokenizer(name, folder):
    "Copy the files of a tokenizer into a folder. Return whether it has files."
    file, folder = tokenizer_file(name), Path(folder)
    if file is None or file.parent.resolve() == folder.resolve():
        return file is not None
    replace(folder / 'tokenizer.json', file.read_bytes())
    if file.name == 'tokenizer.json':       # otherwise its neighbours may be another tokenizer's
        for other in BESIDE:
            if file.with_name(other).exists():
                replace(folder / other, file.with_name(other).read_bytes())
        if not file.with_name('generation_config.json').exists():
            settings = generation_of(file)
            ids = {mark: settings[mark] for mark in ('bos_token_id', 'eos_token_id', 'pad_token_id')
                   if settings.get(mark) is not None}
            if ids:
                write_json(folder / 'generation_config.json', ids)
    return True


def keep_tokenizer(source, folder):
    "Copy the files that name a checkpoint's tokenizer into the folder of another checkpoint."
    run_file = checkpoint_file(source).with_name('run.json')
    has_files = copy_tokenizer(source, folder)
    if run_file.exists():
        replace(Path(folder) / 'run.json', run_file.read_bytes())
    elif not has_files:
        raise Refused(f'{source} has neither a tokenizer.json nor a run.json, so its tokenizer is '
                      'not known')


def write_tokenizer(name, folder, context):
    """Write a tokenizer as files that transformers opens: copies of its files, if it has any, or an
    Encoding in their format."""
    has_files, config = copy_tokenizer(name, folder), Path(folder) / 'tokenizer_config.json'
    has_config = config.exists()
    if not has_config:
        from transformers import PreTrainedTokenizerFast
        known = get_tokenizer(name)
        end = END_OF_TEXT if END_OF_TEXT in known.special_tokens_set else None
        PreTrainedTokenizerFast(tokenizer_object=known.inner if has_files else as_tokenizers(known),
                                bos_token=end, eos_token=end, model_max_length=context,
                                clean_up_tokenization_spaces=False).save_pretrained(folder)
    if not has_config or checkpoint_file(name).exists():
        # A run has used the bare tokenizer.json. Another class, or the code that auto_map names,
        # could tokenize differently, so the plain class is named here.
        settings = read_json(config) | dict(tokenizer_class='PreTrainedTokenizerFast',
                                            model_input_names=['input_ids', 'attention_mask'])
        settings.pop('auto_map', None)
        write_json(config, settings)
