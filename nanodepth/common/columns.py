"""Cells as the lines of a table, for a screen and for a Markdown file alike.

Usage:
    print(columns([['run', 'loss'], ['lidas', '0.702']]))
"""


def columns(lines):
    "A table, for a screen or a Markdown file, of lines of cells, a heading first."
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines)
