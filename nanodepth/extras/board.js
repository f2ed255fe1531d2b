const $ = id => document.getElementById(id), read = id => $(id).textContent;
const make = (tag, fields = {}, ...inside) => { const e = Object.assign(document.createElement(tag), fields); e.append(...inside); return e; };
const about = JSON.parse(read('about')), quiet = matchMedia('(prefers-reduced-motion: reduce)');
let how = {}, chosen = new Set(), focus = 0, past = [], latest, number = 0, now = 0, dragged;      // `number` counts what was asked, so that late answers are known

// ---- the workers: the first looks at the prompt; the others, if there are any, count right answers
const source = URL.createObjectURL(new Blob([read('worker')])), waiting = new Map(), loads = Object.create(null);
let asked = 0;
const cores = Math.max(1, Math.min(4, navigator.hardwareConcurrency || 2)), workers = [];
function hire() {
  const worker = new Worker(source);
  worker.onmessage = ({data: {id, answer, error}}) => {
    if (id === undefined) throw Error(error);           // it could not even begin
    const {done, failed} = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) done(answer); else failed(Error(error));
  };
  worker.postMessage({name: 'begin', body: about});
  workers.push(worker);
  return worker;
}
for (let k = 0; k < (about.questions ? cores : 1); k++) hire();
function tell(worker, name, body, ...moved) {
  worker.postMessage({id: ++asked, name, body}, moved);
  return new Promise((done, failed) => waiting.set(asked, {done, failed}));
}
async function post(name, body, worker = workers[0]) {          // a model is read when it is first needed
  await (loads[body.model] ??= load(body.model));
  return tell(worker, name, body);
}
async function load(name) {             // its weights, part by part
  for (let at = 0; at < about.lengths[name]; at += about.part) {
    const part = $(`weights of ${name} ${at}`), raw = part.textContent;
    await Promise.all(workers.map(worker => tell(worker, 'weights', {model: name, at, raw})));
    part.remove();
    if ($('loading')) $('loading').value = (at + about.part) / about.lengths[name];
  }
  if ($('loading')) $('loading').hidden = true;
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
  for (const id of ['window', 'solver']) wrap[id] = $(id).value;
  for (const id of ['K', 'T', 'beta']) if ($(id).value !== '' && !$(id).disabled) wrap[id] = Number($(id).value);
  return $('wrapped').checked ? {...found, wrap} : found;
}
function looping(at) {          // how often the wrapper runs the layer at a place
  const {wrap} = state(), depth = order().length, middle = /^mid(\d+)$/.exec(wrap?.window), ends = /^(\d+)-(\d+)$/.exec(wrap?.window);
  const n = Number(middle?.[1]), start = middle ? about.middle[`${depth},${n}`] ?? Math.floor(depth / 2) - Math.floor(n / 2) : Number(ends?.[1]), end = middle ? start + Number(middle[1]) - 1 : Number(ends?.[2]);
  return wrap && start <= at && at <= end ? wrap.K : 1;
}
const loopText = ({solver, K, T = 1}) => `the tiles marked × ${K} as one block, ${K} times by ${solver === 'naive' ? 'a full step' : `a step of ${T}/${K}`}`;
const wrapText = ({window, solver, K, T, beta}) => `looped(model, '${window}', '${solver}', K=${K}${T ? `, T=${T}` : ''}${beta !== undefined ? `, beta=${beta}` : ''})`;
function python() {
  const {order: list, wrap, r} = state(), both = list && wrap, call = r ? `core_of(model).r = ${r}\nmodel(tokens)` : list && !wrap ? `model(tokens, order=[${list.join(', ')}])` : 'model(tokens)';
  return `from nanodepth import load_model${wrap ? ', looped' : ''}\n${both ? 'from nanodepth.loop import running\n' : ''}${r ? 'from nanodepth.retrofit import core_of\n' : ''}\nmodel = load_model('${model().run}')\n` +
    (wrap ? `with ${both ? `running(model, [${list.join(', ')}]), ` : ''}${wrapText(wrap)}:\n    ` : '') + call;
}
function tile(at) {
  const one = make('button');
  one.onclick = event => {
    if (event.shiftKey) for (let k = Math.min(at, focus); k <= Math.max(at, focus); k++) chosen.add(k);
    else chosen.has(at) ? chosen.delete(at) : chosen.add(at);
    focus = at; draw();
  };
  one.ondragstart = () => { dragged = at; };
  one.ondragover = event => event.preventDefault();
  one.ondrop = event => { event.preventDefault(); drop(dragged, at); };
  return one;
}
function tiles(from) {          // `from` says where each comes from, if they shall be seen to move
  const list = order(), before = from && !quiet.matches ? [...$('tiles').children].map(tile => tile.getBoundingClientRect()) : null;
  $('T').disabled = $('solver').value === 'naive'; $('beta').disabled = $('solver').value !== 'rk';
  const box = $('tiles');               // a tile stays where it is pressed: only what it says is changed
  while (box.children.length > list.length) box.lastChild.remove();
  while (box.children.length < list.length) box.append(tile(box.children.length));
  list.forEach((i, at) => {
    const one = box.children[at], times = looping(at);
    one.tabIndex = at === focus ? 0 : -1; one.draggable = !core();
    one.style.background = colour(i); one.style.color = '#000';
    one.replaceChildren(String(i), ...[...extra(i), ...(times > 1 ? [`× ${times}`] : [])].map(textContent => make('small', {textContent})));
    one.setAttribute('aria-pressed', chosen.has(at));
    one.setAttribute('aria-label', `layer ${i}, place ${at + 1} of ${list.length}${times > 1 ? `, ${times} times` : ''}`);
  });
  if (before) [...$('tiles').children].forEach((tile, at) => {
    const start = before[from[at]], end = tile.getBoundingClientRect();
    if (start) tile.animate([{transform: `translate(${start.x - end.x}px, ${start.y - end.y}px)`}, {transform: 'none'}], {duration: 700, easing: 'ease-in-out'});
  });
}
const fail = (text, near = '') => { $('error').textContent = text; $('near').textContent = near; };
function failed(error) {        // no old answers beside it
  for (const id of ['verdict', 'cost', 'next', 'after', 'appears', 'behind', 'stairs']) $(id)?.replaceChildren();
  fail(error.message);
}
// ---- changes
function change(next, keep = [], wrapped = $('wrapped').checked) {
  if (!next.length) return fail('the order is empty: it must name at least one layer');
  remember(); how = {order: next}; $('wrapped').checked = wrapped; chosen = new Set(keep);
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
  for (const id of DIALS) if (wrap && id in wrap) $(id).value = wrap[id];
  now = whole(step, 0, STEPS.length - 1) ? step : 0;
  $('prompt').value = String(prompt ?? '');
}
// ---- what Undo goes back to: the order, the wrapper, and where there are no puzzles the prompt
const DIALS = ['window', 'solver', 'K', 'T', 'beta'];
const snapshot = () => ({how: {...how}, wrapped: $('wrapped').checked, dials: DIALS.map(id => $(id).value), prompt: about.questions ? null : $('prompt').value});
const remember = () => past.push(latest);
function undo() {
  if (!past.length) return;
  const was = past.pop();
  how = was.how; $('wrapped').checked = was.wrapped; chosen.clear();
  DIALS.forEach((id, k) => { $(id).value = was.dials[k]; });
  if (was.prompt !== null) $('prompt').value = was.prompt;
  draw(); refresh();
}
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

// ---- the walk, and what else is pressed
function step() {
  const [title, story, label, , line] = STEPS[now];
  if (!$('steps').children.length) $('steps').append(...STEPS.map(([title], k) => make('button', {textContent: `${k + 1} ${title}`, onclick: () => { now = k; step(); toLink(); }})));
  [...$('steps').children].forEach((button, k) => button.setAttribute('aria-current', k === now ? 'step' : 'false'));
  latest = snapshot();
  $('undo').ariaDisabled = String(!past.length);                // not `disabled`, which would lose the focus
  $('name').textContent = `${now + 1}. ${title}`; $('story').textContent = story; $('scene').textContent = label();
  $('code').textContent = python();
  $('python').hidden = !line;
  if (line) $('python').textContent = line();
}
$('scene').onclick = () => STEPS[now][3]();
for (const [id, textContent, title, onclick] of [['repeat', 'Repeat', 'r', repeat], ['out', 'Leave out', 'Delete', leaveOut], ['left', 'Move left', 'Shift + left arrow', () => move(-1)],
  ['right', 'Move right', 'Shift + right arrow', () => move(1)], ['undo', 'Undo', 'u', undo], ['plain', 'Unchanged', 'p', () => asItWas()]]) $('moves').append(make('button', {id, textContent, title, onclick}));
$('text').onchange = async () => {
  const mine = ++number;
  if (!$('text').value.trim()) return asItWas();
  try {
    const found = await post('order', {model: current(), text: $('text').value});
    if (mine === number) change(found.order);
  } catch (error) { fail(error.message, error.message); document.body.dataset.counted = number; }
};
for (const id of [...DIALS, 'wrapped']) $(id).onchange = () => {        // who turns a dial wants the wrapper
  if (id !== 'wrapped') $('wrapped').checked = true;
  if ($('K').value === '') $('K').value = $('K').defaultValue;
  remember(); draw(); refresh();
};
