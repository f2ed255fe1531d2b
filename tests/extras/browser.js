// What tests/extras/browser.py runs in the page. Every visible text and what lies behind it: [ratio, text]
// where that is below 4.5.
() => {
  const parse = c => { const m = c.match(/[\d.]+/g).map(Number); return c.startsWith('color(') ? [...m.slice(0, 3).map(v => 255 * v), m[3] ?? 1] : [...m.slice(0, 3), m[3] ?? 1]; };
  const over = (top, under) => top.slice(0, 3).map((v, k) => v * top[3] + under[k] * (1 - top[3]));
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('script, style, :disabled')) continue;
    let ground = [];
    for (let p = e; p; p = p.parentElement) ground.unshift(parse(getComputedStyle(p).backgroundColor));
    ground = ground.reduce((under, top) => over(top, under), [255, 255, 255]);
    const ink = over(parse(getComputedStyle(e).color), ground), [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push([ratio.toFixed(2), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return bad;
}
