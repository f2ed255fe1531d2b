"""What everything uses. The scripts import it first: from then on Ctrl-C ends them in a line."""
import sys
from pathlib import Path


def end(kind, error, trace):
    "What becomes of an error that nobody catches: while a script is still importing, say."
    in_tqdm = trace and any('tqdm' in place for place in places(trace))
    if issubclass(kind, KeyboardInterrupt):
        print('stopped', file=sys.stderr)
    elif issubclass(kind, ValueError) and in_tqdm:
        print(f'{error}: a variable TQDM_... in the environment has no such value', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def places(trace):
    while trace:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


script = getattr(sys.modules['__main__'], '__file__', None)
if script and Path(script).resolve().parent == Path(__file__).resolve().parents[1]:
    sys.excepthook = end
