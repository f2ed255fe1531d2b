"""Name a process that hangs, and end the run: the others would wait for it for ever.

The idea: a thread of each process writes now and then where the process is (a rising number and a
few words) to a store that all share. If no process advances for too long, the one furthest behind
holds up the others, or one that has stopped writing. The first to see this reports it and ends, and
torchrun ends the rest.

Here: torchrun itself handles a process that dies: it names the rank and exit code, and ends the
others on its machine.

Usage:
    world.watch = Watch(rank, size, seconds=600)
    world.at('the batch of step 12')
"""
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from common.errors import Refused


def leave_with_parent():
    """torchrun ends the processes it began, unless it is killed itself: then nobody would, and they
    would wait for each other, or for its store, for ever. Who sees another parent ends, and saves
    what it has."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':    # torchrun's, since it began us
        place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        try:
            socket.create_connection(place, timeout=60).close()
        except ConnectionRefusedError:
            raise Refused('torchrun, which began this process, is gone', alone=True) from None
        except OSError:         # a network that is slow to come up: the process group waits longer
            pass
    parent = os.getppid()

    def look():
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


class Watch:
    def __init__(self, rank, size, seconds):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.count, self.place = 0, 'the beginning'
        # Its own connection: this thread must not wait for the main thread's requests.
        self.store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']),
                                   is_master=False, wait_for_workers=False,
                                   timeout=timedelta(seconds=max(10, seconds)))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look_around, daemon=True)
        self.thread.start()

    def stop(self):
        """Call before the store and the process group close: a thread still using them would keep
        the process from ending."""
        self.over.set()
        self.thread.join()

    def at(self, place):
        self.count, self.place = self.count + 1, place

    def look_around(self):
        here, beats = f'{socket.gethostname()}, process {os.getpid()}', 0
        seen, moved = {}, time.monotonic()
        spoke, last = dict.fromkeys(range(self.size), moved), moved
        while not self.over.is_set():
            beats += 1
            try:
                self.store.set(f'watch/{self.rank}', f'{beats}|{self.count}|{self.place}|{here}')
                found = {r: self.store.get(f'watch/{r}').decode().split('|')
                         for r in range(self.size) if self.store.check([f'watch/{r}'])}
            except Exception:       # the store is gone: torchrun, which holds it, is too or will be
                self.over.wait(1)
                continue
            now = time.monotonic()
            if now - last > self.seconds / 2:       # we stood still ourselves (Ctrl-Z): count anew
                moved, spoke = now, dict.fromkeys(spoke, now)
            last = now
            for r, (beat, count, *_) in found.items():
                before = seen.get(r, (None, None))
                spoke[r] = now if beat != before[0] else spoke[r]
                moved = now if count != before[1] else moved
                seen[r] = (beat, count)
            if now - moved > self.seconds:
                silent = [r for r in found if now - spoke[r] > self.seconds / 2]
                last = min((int(found[r][1]) for r in found), default=0)
                self.end(silent or [r for r in found if int(found[r][1]) == last], found,
                         bool(silent))
            self.over.wait(min(5, self.seconds / 10))

    def end(self, stuck, found, mute):
        names = '; '.join(f'rank {r} '
                          f'({found[r][3]}){", which says nothing any more, last" if mute else ""} '
                          f'at {found[r][2]}' for r in stuck)
        print(f'\ntrain.py: no process has advanced for {self.seconds} seconds. Held '
              f'up by {names}. The last checkpoint is kept: the same '
              'command goes on from it.', file=sys.stderr, flush=True)
        os._exit(1)
