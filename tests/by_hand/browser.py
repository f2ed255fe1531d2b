"""docs/demo.html, or a page of `nanodepth play`, in headless Chromium (which must be on the path):
its six steps on a wide screen and on a phone, free play by keys, and a link.
Usage: python tests/by_hand/browser.py [PAGE]     leaves out/browser/*.png
"""
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE = Path(sys.argv[1] if sys.argv[1:] else 'docs/demo.html').resolve()
PICTURES = Path('out/browser')
ANSWERED = 'document.body.dataset.counted === String(number)'   # of its last question
NO_WIDER = 'document.documentElement.scrollWidth <= innerWidth'


def wait(page):
    page.wait_for_function(ANSWERED, timeout=120_000)
    assert not page.inner_text('#error') and page.inner_text('#verdict')
    assert page.evaluate(NO_WIDER)


def press(page, selector):
    page.click(selector)
    wait(page)
    return page.locator('#tiles button').count()


def six_steps(page, width):
    depth = page.locator('#tiles button').count()
    for k, tiles in enumerate((depth + 2, depth - 1, depth, 2, depth, 6), start=1):
        page.click(f'#steps button:nth-child({k})')
        assert press(page, '#scene') == tiles, f'step {k}'
        page.screenshot(path=PICTURES / f'{width}-{k}.png', full_page=True)
        if k == 3:
            assert all(text.endswith('%') for text in page.locator('#stairs b').all_inner_texts())
        if k == 5:
            assert "'naive'" in page.inner_text('#python')
            assert press(page, '#scene') == depth and "'rk'" in page.inner_text('#python')
    assert press(page, '#scene') == 12 and 'r = 4' in page.inner_text('#python')


def free_play(page):
    "Two tiles are repeated by keys. The link is what is seen, and an undo takes it back."
    tiles = page.locator('#tiles button')
    depth = tiles.count()
    tiles.nth(2).focus()
    for key in ('Space', 'ArrowRight', 'Space', 'r'):
        page.keyboard.press(key)
    wait(page)
    link, verdict = page.url, page.inner_text('#verdict')
    page.keyboard.press('u')
    wait(page)
    assert tiles.count() == depth
    page.goto('about:blank')
    page.goto(link)
    wait(page)
    assert tiles.count() == depth + 2 and page.inner_text('#verdict') == verdict


PICTURES.mkdir(parents=True, exist_ok=True)
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which('chromium'),
                                         args=['--no-sandbox'])
    for width in (1280, 390):
        context = browser.new_context(offline=True, viewport=dict(width=width, height=844))
        errors = []
        for deed in (lambda page: six_steps(page, width), free_play):
            page = context.new_page()
            page.on('pageerror', lambda error: errors.append(str(error)))
            page.goto(PAGE.as_uri())
            wait(page)
            deed(page)
        assert not errors, errors
        print(f'{width} pixels: six steps, free play, a link')
    browser.close()
