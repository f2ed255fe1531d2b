const $ = id => document.getElementById(id), read = id => $(id).textContent;
const make = (tag, fields = {}, ...inside) => { const e = Object.assign(document.createElement(tag), fields); e.append(...inside); return e; };
const about = JSON.parse(read('about')), quiet = matchMedia('(prefers-reduced-motion: reduce)');
let how = {}, chosen = new Set(), focus = 0, past = [], number = 0, now = 0, dragged;      // `number` counts what was asked, so that late answers are known

// ---- the workers: the first looks at the prompt; the others, if there are any, count right answers
const source = URL.createObjectURL(new Blob([read('worker')])), waiting = new Map(), given = new Set();
let asked = 0;
const workers = Array.from({length: about.questions ? Math.max(1, Math.min(4, navigator.hardwareConcurrency || 2)) : 1}, () => {
  const worker = new Worker(source);
  worker.onmessage = ({data: {id, answer, error}}) => {
    const {done, failed} = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) done(answer); else failed(Error(error));
  };
  worker.postMessage({name: 'begin', body: about});
  return worker;
});
function tell(worker, name, body, ...moved) {
  worker.postMessage({id: ++asked, name, body}, moved);
  return new Promise((done, failed) => waiting.set(asked, {done, failed}));
}
function post(name, body, worker = workers[0]) {        // a model is decoded when it is first needed, part by part
  const key = `${workers.indexOf(worker)} ${body.model}`;
  for (let at = 0, part; !given.has(key) && (part = $(`weights of ${body.model} ${at}`)); at += about.part) {
    const text = atob(part.textContent), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    tell(worker, 'weights', {model: body.model, at, raw: bytes.buffer}, bytes.buffer);
    if (workers.length === 1) part.remove();
  }
  given.add(key);
  return tell(worker, name, body);
}

// ---- how the model runs, in the tiles and in words
const PALETTE = ['#e69f00', '#56b4e9', '#009e73', '#f0e442', '#cc79a7', '#d55e00', '#9aa7b5', '#a594f9'];
const core = () => Boolean(model().parts);              // a recurrent one: its order is not free
const same = (a, b) => a.length === b.length && a.every((v, k) => v === b[k]);
function notation(list) {                       // 3-2x2-3, or the layers by number
  const n = Math.max(...list) + 1, plain = k => k ? [`${k}`] : [];
  if (list.every((i, at) => i === at)) return `${n}`;
  const out = [...Array(model().layers).keys()].filter(i => !list.includes(i));
  if (out.length && out.length < 4 && list.every((i, at) => !at || list[at - 1] < i)) return `all but ${out.join(', ')}`;
  for (let a = 0; a < n; a++) for (let size = 1; a + size <= n; size++) for (let times = 2; times * size <= list.length; times++) {
    const built = [...Array(a).keys(), ...Array(times).fill([...Array(size).keys()].map(i => a + i)).flat(), ...[...Array(n).keys()].slice(a + size)];
    if (same(built, list)) return [...plain(a), `${size}x${times}`, ...plain(n - a - size)].join('-');
  }
  return list.join(' ');
}
function state() {
  if (core()) return how.r && how.r !== model().r ? {r: how.r} : {};
  const found = how.order && !same(how.order, model().order) ? {order: how.order} : {}, wrap = {};
  for (const id of ['window', 'method']) wrap[id] = $(id).value;
  for (const id of ['K', 'T', 'beta']) if ($(id).value !== '') wrap[id] = Number($(id).value);
  return $('wrapped').checked ? {...found, wrap} : found;
}
function looping(at) {          // how often the wrapper runs the layer at a place
  const {wrap} = state(), depth = order().length, middle = /^mid(\d+)$/.exec(wrap?.window), ends = /^(\d+)-(\d+)$/.exec(wrap?.window);
  const n = Number(middle?.[1]), start = middle ? about.middle[`${depth},${n}`] ?? Math.floor(depth / 2) - Math.floor(n / 2) : Number(ends?.[1]), end = middle ? start + Number(middle[1]) - 1 : Number(ends?.[2]);
  return wrap && start <= at && at <= end ? wrap.K : 1;
}
const loopText = ({method, K}) => `where the tiles marked × ${K} run as one block, ${K} times by ${method === 'naive' ? 'a full step' : `a step of 1/${K}`}`;
const wrapText = ({window, method, K, T, beta}) => `looped(model, '${window}', '${method}', K=${K}${T ? `, T=${T}` : ''}${beta !== undefined ? `, beta=${beta}` : ''})`;
function python() {
  const {order: list, wrap, r} = state(), call = r ? `model(tokens, r=${r})` : list ? `model(tokens, order=[${list.join(', ')}])` : 'model(tokens)';
  return `model = load_model('${model().run}')\n` + (wrap ? `with ${wrapText(wrap)}:\n    ` : '') + call;
}
function tiles(from) {          // `from` says where each comes from, if they shall be seen to move
  const list = order(), before = from && !quiet.matches ? [...$('tiles').children].map(tile => tile.getBoundingClientRect()) : null;
  $('tiles').replaceChildren(...list.map((i, at) => {
    const tile = make('button', {textContent: i, tabIndex: at === focus ? 0 : -1});
    tile.style.background = colour(i); tile.style.color = '#000';
    for (const text of [...extra(i), ...(looping(at) > 1 ? [`× ${looping(at)}`] : [])]) tile.append(make('small', {textContent: text}));
    tile.setAttribute('aria-pressed', chosen.has(at));
    tile.setAttribute('aria-label', `layer ${i}, place ${at + 1} of ${list.length}${looping(at) > 1 ? `, ${looping(at)} times` : ''}`);
    tile.onclick = event => {
      if (event.shiftKey) for (let k = Math.min(at, focus); k <= Math.max(at, focus); k++) chosen.add(k);
      else chosen.has(at) ? chosen.delete(at) : chosen.add(at);
      focus = at; draw(); $('tiles').children[at].focus();
    };
    tile.draggable = !core();
    tile.ondragstart = () => { dragged = at; };
    tile.ondragover = event => event.preventDefault();
    tile.ondrop = event => { event.preventDefault(); drop(dragged, at); };
    return tile;
  }));
  if (before) [...$('tiles').children].forEach((tile, at) => {
    const start = before[from[at]], end = tile.getBoundingClientRect();
    if (start) tile.animate([{transform: `translate(${start.x - end.x}px, ${start.y - end.y}px)`}, {transform: 'none'}], {duration: 700, easing: 'ease-in-out'});
  });
}
const fail = text => { $('error').textContent = text; };
function bars(id, rows) {
  $(id).replaceChildren(...rows.flatMap(([text, p, right]) => {
    const bar = make('i', {className: right ? 'right' : ''});
    bar.style.width = `${Math.max(1, 100 * p)}%`;
    return [make('span', {textContent: (right ? '✓ ' : '') + text}), bar, make('span', {textContent: `${(100 * p).toFixed(1)}%`})];
  }));
}
// ---- changes
function change(next, keep = [], wrapped = $('wrapped').checked) {
  if (!next.length) return fail('the order is empty: it must name at least one layer');
  past.push([how.order, $('wrapped').checked]); how = {order: next}; $('wrapped').checked = wrapped; chosen = new Set(keep);
  focus = Math.min(keep[0] ?? focus, next.length - 1);
  draw(); refresh();
}
const picked = () => chosen.size ? [...chosen].sort((a, b) => a - b) : [focus];
function move(by) {
  const list = [...order()], places = picked();
  if (places.some(at => at + by < 0 || at + by >= list.length)) return;
  for (const at of by > 0 ? places.reverse() : places) [list[at], list[at + by]] = [list[at + by], list[at]];
  change(list, places.map(at => at + by).sort((a, b) => a - b));
}
function repeat() {
  const list = [...order()], places = picked(), end = places.at(-1) + 1;
  list.splice(end, 0, ...places.map(at => list[at]));
  change(list, places.map((_, k) => end + k));
}
const leaveOut = () => { const places = picked(); change(order().filter((_, at) => !places.includes(at))); };
// ---- a link may come from anywhere: of it only what this page could have written is taken
const linked = () => JSON.parse(decodeURIComponent(location.hash.slice(1)));
function takeLink({prompt, how: {order: list, r, wrap} = {}, now: step}) {
  const whole = (value, low, high) => Number.isInteger(value) && low <= value && value <= high;
  how = {};
  if (Array.isArray(list) && list.length && list.length <= 200 && list.every(i => whole(i, 0, model().layers - 1))) how.order = list;
  if (whole(r, 1, 64)) how.r = r;
  $('wrapped').checked = Boolean(wrap);
  for (const id of ['window', 'method', 'K', 'T', 'beta']) if (wrap && id in wrap) $(id).value = wrap[id];
  now = whole(step, 0, STEPS.length - 1) ? step : 0;
  $('prompt').value = String(prompt ?? '');
}
const undo = () => { if (past.length) { let list; [list, $('wrapped').checked] = past.pop(); how = {order: list}; chosen.clear(); draw(); refresh(); } };
function drop(from, to) {        // what is chosen, if the tile is among it, goes where another tile is
  const places = chosen.has(from) ? picked() : [from], list = order(), after = to > places.at(-1);
  if (places.includes(to)) return;
  const rest = list.flatMap((i, at) => places.includes(at) ? [] : [[i, at]]), k = rest.findIndex(([, at]) => at === to) + (after ? 1 : 0);
  change([...rest.slice(0, k).map(([i]) => i), ...places.map(at => list[at]), ...rest.slice(k).map(([i]) => i)], places.map((_, n) => k + n));
}
$('tiles').onkeydown = event => {
  const keys = {ArrowLeft: -1, ArrowRight: 1}, acts = {Delete: leaveOut, Backspace: leaveOut, r: repeat, u: undo, p: asItWas};
  if (event.key in keys && !(event.shiftKey && core())) {
    if (event.shiftKey) move(keys[event.key]);
    else { focus = Math.max(0, Math.min(order().length - 1, focus + keys[event.key])); draw(); }
  } else if (acts[event.key] && !core()) acts[event.key]();
  else return;
  event.preventDefault(); $('tiles').children[focus]?.focus();
};


// ---- the walk, whose steps are a page's own, and what else both pages have
function step() {
  const [title, story, label, , line] = STEPS[now];
  $('steps').replaceChildren(...STEPS.map(([title], k) => {
    const button = make('button', {textContent: `${k + 1} ${title}`, onclick: () => { now = k; step(); $('steps').children[k].focus(); toLink(); }});
    if (k === now) button.setAttribute('aria-current', 'step');
    return button;
  }));
  $('name').textContent = `${now + 1}. ${title}`; $('story').textContent = story; $('scene').textContent = label();
  $('code').textContent = python();
  if (line) $('python').textContent = line();
}
$('scene').onclick = () => STEPS[now][3]();
for (const [id, act] of Object.entries({left: () => move(-1), right: () => move(1), repeat, out: leaveOut, undo, plain: () => asItWas()})) $(id).onclick = act;
$('text').onchange = async () => {
  const mine = ++number;
  try {
    const found = await post('order', {model: current(), text: $('text').value});
    if (mine === number) change(found.order);
  } catch (error) { fail(error.message); }
};
for (const id of ['window', 'method', 'K', 'T', 'beta', 'wrapped']) $(id).onchange = () => { draw(); refresh(); };
