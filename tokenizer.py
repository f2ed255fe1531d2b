"""Text -> tokens: every tokenizer as a tiktoken Encoding, so that the rest of the code knows one kind.

The idea: tiktoken needs two things, one regular expression that cuts text into words, and a rank for each token that says
which pair of neighbours to merge first. Bytes are such a tokenizer without merges; a byte-level BPE tokenizer.json (GPT-2's,
cosmo2's, Llama 3's) holds both, if its steps are put into one expression.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", Table 2: the tokenizer is cosmo2.
Here: the toy configs read bytes, which need no download and no training.

Usage:
    enc = get_tokenizer('bytes')                # or 'gpt2', a tokenizer.json, a folder with one, a run of ours
    assert enc.decode(enc.encode('depth')) == 'depth'
    print(enc.n_vocab)                          # 257: the bytes and an end-of-text token
"""
import json
from pathlib import Path

import tiktoken

END_OF_TEXT = '<|endoftext|>'
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class DataError(ValueError):
    "Something about the data that the person in front of the screen can mend."


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding='utf-8'))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f'{path} is not JSON: {error}') from None


def get_tokenizer(name):
    """A tiktoken Encoding: encode, decode, n_vocab. `name` is 'bytes', one that tiktoken knows ('gpt2' and so on; it
    downloads them), a tokenizer.json, or a folder that has one: a Hugging Face checkpoint, a dataset, a run of ours."""
    path = Path(name)
    if name == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]', mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={END_OF_TEXT: 256})
    if path.is_dir() and (path / 'tokenizer.json').exists():
        return from_tokenizer_json(path / 'tokenizer.json')
    if path.is_dir() and (path / 'run.json').exists():
        return get_tokenizer(read_json(path / 'run.json')['tokenizer'])
    if path.suffix == '.pt' and path.is_file():
        return get_tokenizer(path.parent)
    if path.is_file():
        return from_tokenizer_json(path)
    if name in tiktoken.list_encoding_names():
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:        # requests' errors are OSErrors
            raise DataError(f'tokenizer {name!r}: tiktoken could not download it ({type(error).__name__}); '
                            "without a network use 'bytes' or a tokenizer.json") from None
    raise DataError(f"tokenizer {name!r} is not known: allowed are 'bytes', a tokenizer.json or a folder with one, "
                    f'and {", ".join(tiktoken.list_encoding_names())}')


def start_of_document(tokenizer):
    "The tokens before a document: an end of text, where the tokenizer has one."
    return [tokenizer.encode_single_token(END_OF_TEXT)] if END_OF_TEXT in tokenizer.special_tokens_set else []


def from_tokenizer_json(path):
    """A byte-level BPE tokenizer.json as a tiktoken Encoding. tiktoken cuts text by one regular expression and merges
    the pair with the lowest rank first, so the file's pre-tokenizer must become one expression, and its merges must
    make new tokens in the order of their ids: both hold for GPT-2, cosmo2, Llama 3 and their kin."""
    path = Path(path)
    spec = read_json(path)
    bpe, to_bytes = spec.get('model', {}), {char: byte for byte, char in byte_alphabet().items()}
    special = {token['content']: token['id'] for token in spec.get('added_tokens', [])}
    words = {token: i for token, i in bpe.get('vocab', {}).items() if token not in special} if bpe.get('merges') else {}
    if bpe.get('type', 'BPE') != 'BPE' or not spec.get('pre_tokenizer') or not set(to_bytes) <= words.keys() \
            or not set(''.join(words)) <= set(to_bytes):
        raise DataError(f'{path} is not a byte-level BPE tokenizer, the only kind that tiktoken can represent')
    if spec.get('normalizer'):
        raise DataError(f'{path} normalizes text ({spec["normalizer"]["type"]}) before it cuts it, which tiktoken cannot do')
    ranks = {bytes(to_bytes[char] for char in word): i for word, i in words.items()}
    made = [words[merge.replace(' ', '') if isinstance(merge, str) else ''.join(merge)] for merge in bpe['merges']]
    if made != sorted(made) or len(set(made)) + 256 != len(words):
        raise DataError(f'{path}: its merges do not make its tokens in the order of their ids, which tiktoken needs')
    return tiktoken.Encoding(path.parent.name or 'tokenizer', pat_str=word_pattern(spec['pre_tokenizer'], path),
                             mergeable_ranks=ranks, special_tokens=special)


def byte_alphabet():
    "GPT-2's printable character for each byte: itself where it prints, else the next one free from 256 on."
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {**{b: chr(b) for b in prints}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def word_pattern(pre_tokenizer, path):
    "The pre-tokenizer's steps as one regular expression."
    steps = pre_tokenizer.get('pretokenizers', [pre_tokenizer])
    kinds = [step['type'] for step in steps]
    known = kinds[-1] == 'ByteLevel' and not steps[-1].get('add_prefix_space')
    if known and kinds == ['ByteLevel'] and steps[0].get('use_regex', True):
        return GPT2_WORDS
    if known and kinds == ['Digits', 'ByteLevel'] and steps[1].get('use_regex', True):
        # Digits are cut off first, and each piece is then cut by GPT-2's pattern on its own. So a number takes no space
        # along, and white space before one ends its piece, where \s+(?!\S) takes all of it.
        digits = r'\p{N}' if steps[0].get('individual_digits') else r'\p{N}+'
        return GPT2_WORDS.replace(r' ?\p{N}+', digits).replace(r'|\s+(?!\S)', r'|\s+(?=\p{N})|\s+(?!\S)')
    if known and kinds == ['Split', 'ByteLevel'] and not steps[1].get('use_regex', True):
        if steps[0]['behavior'] == 'Isolated' and not steps[0].get('invert') and 'Regex' in steps[0]['pattern']:
            return steps[0]['pattern']['Regex']
    raise DataError(f'{path} cuts text by {" then ".join(kinds)}, which is not one of the forms that become one pattern')
