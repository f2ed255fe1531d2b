"""A process that hangs is named, and the run ends: its sisters would wait for it for ever.

The idea: every process says where it is (a number that rises and a few words) in the store that
they all share, once in a while and by a thread of its own. When nobody has come further for too
long, whoever is furthest behind holds up the others; a process that does not even say anything any
more is it. The first that sees this says so and ends, and torchrun ends the rest.

Here: a process that dies is torchrun's own affair: it names the rank and its exit code, and ends
the others at once on its machine.

Usage:
    world.watch = Watch(rank, size, seconds=600)
    world.at('the batch of step 12')
"""
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist


class Watch:
    def __init__(self, rank, size, seconds):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.count, self.place = 0, 'the beginning'
        # A line to the store of its own: a thread must not wait behind what the main one asks for.
        self.store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']),
                                   is_master=False, wait_for_workers=False,
                                   timeout=timedelta(seconds=max(10, seconds)))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look_around, daemon=True)
        self.thread.start()

    def stop(self):
        """Before the store and the processes' group go: a thread that still asked them would keep
        the process from ending."""
        self.over.set()
        self.thread.join()

    def at(self, place):
        self.count, self.place = self.count + 1, place

    def look_around(self):
        here, beats = f'{socket.gethostname()}, process {os.getpid()}', 0
        seen, moved, spoke = {}, time.monotonic(), dict.fromkeys(range(self.size), time.monotonic())
        while not self.over.is_set():
            beats += 1
            try:
                self.store.set(f'watch/{self.rank}', f'{beats}|{self.count}|{self.place}|{here}')
                found = {r: self.store.get(f'watch/{r}').decode().split('|')
                         for r in range(self.size) if self.store.check([f'watch/{r}'])}
            except Exception:       # the store is gone, and with it the run
                return
            now = time.monotonic()
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
        print(f'\ntrain.py: for {self.seconds} seconds no process has come further. Held '
              f'up by {names}. The last checkpoint is kept: the same '
              'command goes on from it.', file=sys.stderr, flush=True)
        os._exit(1)
