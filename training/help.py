"""What `--help` prints: the fields of a dataclass as they are written, with their comments. Nothing
is imported for it, because torch takes seconds to load."""
import ast
import re
from pathlib import Path


def print_fields(file, name):
    "Print the fields of the class `name` in a file. A field without a default is typed as a word."
    source = Path(file).read_text(encoding='utf-8')
    [kind] = [node for node in ast.parse(source).body if getattr(node, 'name', '') == name]
    for line in source.splitlines()[kind.lineno:kind.end_lineno]:
        field = re.fullmatch(r'    (\w+): ([^=#]+?)( = [^#]+?)?(\s+#.*)?', line)
        if field:
            name, kind, default, comment = (part or '' for part in field.groups())
            option = f'--{name}: {kind}{default}' if default else f'{name}: {kind}'
            print(f'  {option:42} {comment.strip()}'.rstrip())
        elif line.startswith('    # '):
            print(f'  {line.strip()}')
        elif line.startswith('    def '):
            break
