const $ = id => document.getElementById(id), read = id => $(id).textContent;
const make = (tag, fields = {}, ...inside) => { const e = Object.assign(document.createElement(tag), fields); e.append(...inside); return e; };
const about = JSON.parse(read('about')), quiet = matchMedia('(prefers-reduced-motion: reduce)');
let how = {}, chosen = new Set(), focus = 0, past = [], latest, number = 0, now = 0, dragged;      // `number` counts what was asked, so that late answers are known

// ---- the workers: the first looks at the prompt; the others, if there are any, count right answers
const source = URL.createObjectURL(new Blob([read('worker')])), waiting = new Map();
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
}
for (let k = 0; k < cores; k++) hire();
function post(name, body, worker = workers[0]) {
  worker.postMessage({id: ++asked, name, body});
  return new Promise((done, failed) => waiting.set(asked, {done, failed}));
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
  wrap.window = windowOf($('window').value); wrap.solver = $('solver').value;
  for (const id of ['K', 'T', 'beta']) if ($(id).value !== '' && !$(id).disabled) wrap[id] = Number($(id).value);
  return $('wrapped').checked ? {...found, wrap} : found;
}
function windowOf(text) {       // 'mid4' as the first and last place, as pick_window in wrapper.py has it
  const depth = order().length, n = Number(/^mid(\d+)$/.exec(text)?.[1]), first = depth === 36 && n === 4 ? 15 : Math.floor(depth / 2) - Math.floor(n / 2);
  return n && first >= 0 ? `${first}-${first + n - 1}` : text;
}
function looping(at) {          // how often the wrapper runs the layer at a place
  const {wrap} = state(), [first, last] = (wrap?.window ?? '').split('-').map(Number);
  return wrap && first <= at && at <= last ? wrap.K : 1;
}
const loopText = ({solver, K, T = 1}) => `the tiles marked × ${K} as one block, ${K} times by ${solver === 'naive' ? 'a full step' : `a step of ${T}/${K}`}`;
const wrapText = ({window, solver, K, T, beta}) => `wrapped(model, '${window}', '${solver}', K=${K}${T ? `, T=${T}` : ''}${beta !== undefined ? `, beta=${beta}` : ''})`;
function python() {
  const {order: list, wrap, r} = state(), both = list && wrap, call = r ? `core_of(model).r = ${r}\nmodel(tokens)` : list && !wrap ? `model(tokens, order=[${list.join(', ')}])` : 'model(tokens)';
  return `from nanodepth import load_model${wrap ? ', wrapped' : ''}\n${both ? 'from nanodepth.loop import in_order\n' : ''}${r ? 'from nanodepth.retrofit import core_of\n' : ''}\nmodel = load_model('${model().run}')\n` +
    (wrap ? `with ${both ? `in_order(model, [${list.join(', ')}]), ` : ''}${wrapText(wrap)}:\n    ` : '') + call;
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
// ---- what Undo goes back to: the order and the wrapper
const DIALS = ['window', 'solver', 'K', 'T', 'beta'];
const snapshot = () => ({how: {...how}, wrapped: $('wrapped').checked, dials: DIALS.map(id => $(id).value)});
const remember = () => past.push(latest);
function undo() {
  if (!past.length) return;
  const was = past.pop();
  how = was.how; $('wrapped').checked = was.wrapped; chosen.clear();
  DIALS.forEach((id, k) => { $(id).value = was.dials[k]; });
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
// ---- what is shown
const SHOWN = 6, WRITTEN = 16;
let place = 0, question, timer, wide = false, sums = Object.create(null), plain = {};
const runOf = name => about.runs.find(run => run.stages.includes(name));
const runNow = () => about.runs[$('model').selectedIndex];
const model = () => about.models[current()], current = () => runNow().stages[Number($('stage').value)] || runNow().stages.at(-1);
const colour = i => PALETTE[model().kin[i] % PALETTE.length];        // copies share one
const runs = () => how.r || model().r;
const unrolled = () => { const [a, b, c] = model().parts; return [...a, ...Array(runs()).fill(b).flat(), ...c]; };
const order = () => core() ? unrolled() : how.order || model().order;
const everyLayer = () => [...Array(model().layers).keys()];
const quoted = text => JSON.stringify(text), percent = p => `${(100 * p).toFixed(p < 0.1 ? 1 : 0)}%`;
function draw(from) {
  tiles(from);
  for (const id of ['left', 'right', 'repeat', 'out', 'text', 'wrapped']) $(id).disabled = core();
  $('core').hidden = !core(); $('growth').hidden = runNow().stages.length < 2; $('which').hidden = about.runs.length < 2;
  $('r').value = $('times').value = runs() || 1; $('kind').textContent = kind();
}
const asItWas = () => { remember(); how = {}; chosen.clear(); focus = 0; $('wrapped').checked = false; draw(); refresh(); };
const kind = () => core() ? 'cut into an entrance, a core that runs as often as you like, and an exit' : runNow().stages.length > 1 ? 'grown from few layers'
  : model().order.length > model().layers ? 'some of its layers run several times' : '';
const extra = i => model().copies && STEPS[now][0] === 'How it grew' ? [`was ${model().copies[i]}`] : [];
function toLink() {
  history.replaceState(null, '', '#' + encodeURIComponent(JSON.stringify({model: current(), how: state(), prompt: $('prompt').value, question, now})));
}
function fromLink() {
  try {
    const link = linked(), asked = link.question;
    if (!about.models[link.model ?? deep]) return false;
    pick(link.model ?? deep);
    takeLink(link);
    question = asked && [asked.task, asked.answer].every(text => typeof text === 'string') ? asked : undefined;
    if ($('wrapped').checked) $('dials').open = true;
    if (question) $('depth').value = question.task.split('/')[1] || 0;
    return true;
  } catch { return false; }
}
function pick(wanted) {         // a model by its name, as it was
  const run = runOf(wanted), old = $('tiles').children.length;
  $('model').selectedIndex = about.runs.indexOf(run);
  $('stage').max = run.stages.length - 1; $('stage').value = run.stages.indexOf(wanted);
  how = {}; past = []; chosen.clear(); focus = 0; $('wrapped').checked = false;
  draw(model().copies && model().copies.length > old ? model().copies : null);
}

// ---- asking: what comes next, then the loss, where the answer appears, the text, the table, and how many answers are right. A newer request stops what is left.
async function refresh() {
  const mine = ++number, body = {model: current(), how: state(), prompt: $('prompt').value}, done = document.body.dataset;
  const ask = async (name, more = {}) => {
    const found = await post(name, {...body, ...more});
    if (mine !== number) throw 0;
    return found;
  };
  clearTimeout(timer); toLink(); step(); fail('');
  chain(); stairs(body);
  try {
    if (plain.prompt !== body.prompt || plain.model !== body.model) {
      const found = await ask('next', {how: {}});
      plain = {prompt: body.prompt, model: body.model, ...found, loss: await ask('loss', {how: {}})};
    }
    const found = await ask('next'), changed = Object.keys(body.how).length;
    show(found);
    done.answered = mine;
    const loss = await ask('loss');
    $('cost').textContent = (same(found.order, everyLayer()) && found.layers === found.order.length ? `All ${found.layers} layers run once` : `${found.layers} layer runs${found.layers === plain.layers ? '' : ` instead of ${plain.layers}`}`) +
      (body.how.order || body.how.r ? `: ${notation(found.order)}` : '') + (body.how.wrap ? `, ${loopText(body.how.wrap)}` : '') +
      (question ? '.' : `. Loss on the prompt: ${loss.toFixed(2)} nats a token` + (changed ? `, in the unchanged model ${plain.loss.toFixed(2)}.` : '.'));      // what a puzzle states is drawn
    await lens(ask, found);
    done.appeared = mine;
    for (let n = 0; n < WRITTEN; n++) $('after').replaceChildren(body.prompt, make('b', {textContent: await ask('write')}));
    await table(ask, found);
    await count(mine, body);
    if (mine === number) done.counted = mine;
  } catch (error) { if (error && mine === number) { failed(error); done.counted = mine; } }
}
const isRight = text => text !== '' && question.answer.startsWith(text);
function show({next}) {
  const [text, p] = next[0], [was, q] = plain.next[0];
  $('verdict').replaceChildren('It says ', make('b', {textContent: quoted(text)}), ` (${percent(p)} sure). `, ...(question ?
    [make('span', {className: isRight(text) ? 'good' : 'bad', textContent: isRight(text) ? '✓ right' : `✗ wrong, it is ${question.answer}`})] :
    Object.keys(state()).length ? ['The unchanged model says ', make('b', {textContent: quoted(was)}), ` (${percent(q)}).`] : []));
  const before = new Map(plain.next.map(([, p, i]) => [i, p]));
  $('next').replaceChildren(...['next token', '', 'now, unchanged'].map(textContent => make('b', {textContent})), ...next.slice(0, SHOWN).flatMap(([text, p, i]) => {
    const bars = [p, before.get(i) ?? 0].map((share, k) => { const bar = make('i', {className: k ? 'was' : ''}); bar.style.width = `${Math.max(0.5, 100 * share)}%`; return bar; });
    return [make('span', {textContent: quoted(text)}), make('div', {}, ...bars), make('span', {textContent: `${percent(p)}, ${before.has(i) ? percent(before.get(i)) : 'less'}`})];
  }));
}
async function lens(ask, {order, next, tokens}) {       // the last column first: from which layer on is the answer there?
  const answer = next[0][2], said = [];
  let places = 1;
  for (let at = 0; at < places; at++) { const row = await ask('layer', {at, n: 1}); places = row.of; said.push([row.layer, row.says[0], row.ten]); }
  const since = holds => { let from = places - 1; while (from > 0 && holds(said[from - 1])) from--; return from; };
  const named = at => said[at][0] + (said.filter(([layer]) => layer === said[at][0]).length > 1 ? ` in line ${at + 1}` : '');     // a layer that runs twice has two lines
  const first = since(([, says]) => says[2] === answer), ten = since(([, , ids]) => ids.includes(answer)), before = said[first - 1];
  $('appears').replaceChildren('After the prompt, ', make('b', {textContent: quoted(next[0][0])}), ` is among the ten likeliest from layer ${named(ten)} on and the likeliest from layer ${named(first)} on.` +
    (before ? ` The layer before that one would say ${quoted(before[1][0])}.` : ''));
  $('behind').replaceChildren(make('tr', {}, make('th', {textContent: 'layer'}), ...tokens.slice(-16).map(text => make('th', {textContent: /^<\|.*\|>$/.test(text) ? '(start)' : text.trim() ? text : quoted(text)}))), ...said.map(([layer, [text, p, i]]) => {
    const head = make('th', {textContent: layer});
    head.style.background = colour(layer); head.style.color = '#000';
    return make('tr', {}, head, ...Array.from({length: Math.min(16, tokens.length) - 1}, () => make('td', {textContent: ' '})), cell(text, p, i === answer));
  }));
}
function cell(text, p, isAnswer) {
  const found = make('td', {textContent: text.trim() ? text : quoted(text), title: percent(p), className: isAnswer ? 'answer' : ''});
  found.style.background = `color-mix(in srgb, var(--fill) ${Math.round(100 * p)}%, transparent)`;
  return found;
}
async function table(ask, {next}) {                     // the other columns, from the last layer to the first
  const rows = [...$('behind').rows].slice(1);
  for (let at = rows.length - 1; at >= 0; at--) {
    const {says} = await ask('layer', {at, n: 16});
    rows[at].replaceChildren(rows[at].cells[0], ...says.map(([text, p, i], k) => cell(text, p, k === says.length - 1 && i === next[0][2])));
    $('behind').parentElement.scrollLeft = 9999;        // to the answer
  }
}

// ---- puzzles of toys
const task = () => question?.task || about.task;
function chain() {              // what stands for what, read off the prompt
  const text = $('prompt').value, [facts, name] = text.split('?'), links = Object.fromEntries((facts.match(/../g) || []).map(pair => [...pair]));
  const path = [name?.[0]];
  while (links[path.at(-1)] && path.length < 9) path.push(links[path.at(-1)]);
  const known = name?.length === 1 && path.length > 1;
  $('chain').replaceChildren(...(known ? path.flatMap((part, k) => [...(k ? [make('span', {textContent: k < path.length - 1 ? 'stands for →' : 'is →'})] : []), make('b', {textContent: part})]) : []));
  const steps = path.length - 1;
  $('chain').setAttribute('aria-label', known ? path.slice(0, -1).map((part, k) => `${part} ${k < steps - 1 ? 'stands for' : 'is'} ${path[k + 1]}`).join(', ') : 'no chain');
  $('rule').textContent = known ? `The model reads ${text} and must answer ${path.at(-1)}. Read it in pairs: ${path.at(-2)}${path.at(-1)} says that ${path.at(-2)} is ${path.at(-1)}, ` +
    (steps > 1 ? `${path[0]}${path[1]} that ${path[0]} stands for ${path[1]}, ` : '') + `and ?${path[0]} asks for ${path[0]}. The other pairs are there to mislead. Every arrow is a look-up: ` +
    `${steps - 1} times “stands for” (the aliases), and one “is”.` : `The model reads ${quoted(text)} and says what comes next.`;
}
const SLICE = 4;                // questions that a worker answers before it listens again
const levels = () => [0, 1, 2, 3, 4, ...(task().endsWith('/5') ? [5] : [])].map(depth => `toy_assign/${depth}`);
const keyOf = (body, task) => JSON.stringify([body.model, body.how, task]);
function stairs(body) {
  $('stairs').replaceChildren(...levels().map(level => {
    const got = sums[keyOf(body, level)], was = sums[keyOf({...body, how: {}}, level)], bar = make('i'), box = make('div', {}, bar);
    const share = got ? 100 * got.right / got.questions : 0;
    bar.style.height = `${share}%`;
    if (was?.done) { const line = make('u'); line.style.bottom = `${100 * was.right / was.questions}%`; box.append(line); }
    return make('li', {}, make('b', {textContent: !got ? '·' : got.done ? `${share.toFixed(0)}%` : `${got.right} of ${got.questions}`}), box, level.replace('toy_assign/', '') + (level.endsWith('/1') ? ' alias' : ' aliases'));
  }));
}
async function count(mine, body) {      // the present depth, then the others if they were asked for; slices of questions for each worker
  stairs(body);
  const first = levels().includes(task()) ? [task()] : [], rest = wide ? levels().filter(level => !first.includes(level)) : [];
  const bare = {...body, how: {}}, slices = [...first.map(level => [body, level]), ...first.map(level => [bare, level]), ...rest.map(level => [body, level])].flatMap(([of, level], k, all) => {
    if (sums[keyOf(of, level)]?.done || all.findIndex(([other, same]) => keyOf(other, same) === keyOf(of, level)) < k) return [];
    sums[keyOf(of, level)] = undefined;
    return Array.from({length: Math.ceil(about.questions[level].length / SLICE)}, (_, k) => ({of, level, first: k * SLICE, last: (k + 1) * SLICE}));
  });
  await Promise.all(workers.map(async worker => {
    for (let next; mine === number && (next = slices.shift());) {
      const found = await post('measure', {...next.of, task: next.level, first: next.first, last: next.last}, worker);
      if (mine !== number) return;
      const sum = sums[keyOf(next.of, next.level)] ??= {right: 0, questions: 0};
      sum.right += found.right; sum.questions += found.questions; sum.done = sum.questions === about.questions[next.level].length;
      stairs(body);
    }
  }));
}
function ask(depth = Number($('depth').value)) {
  depth = Math.max(0, Math.min(5, Math.round(depth) || 0));
  const level = `toy_assign/${depth}`, all = about.questions[level], q = all[place++ % all.length];
  question = {task: level, answer: q.options[q.answer]};
  $('depth').value = depth; $('prompt').value = q.prompt;
  refresh();
}

// ---- the walk: each step has a scene that a button sets
const grown = about.runs.find(run => run.stages.length > 1) || about.runs[0], deep = grown.stages.at(-1);
const recurrent = about.runs.find(run => about.models[run.stages.at(-1)].parts)?.stages.at(-1), ordinary = !about.models[deep].parts;
function scene({of = deep, depth = 3, order: list, wrap, r, all = false} = {}) {
  const before = current() === of ? [...past, latest] : [];
  if (current() !== of || !list) pick(of);
  past = before; wide = all; how = {order: list, r}; chosen.clear(); focus = 0; $('wrapped').checked = Boolean(wrap);
  for (const [id, value] of Object.entries(wrap || {})) $(id).value = value;
  draw();
  if (question?.task === `toy_assign/${depth}`) refresh(); else ask(depth);
}
const inWords = n => ['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten', 'eleven', 'twelve'][n] || n;
const L = about.models[deep].layers, mid = Math.floor(L / 2), plainOrder = [...Array(L).keys()];
const twice = [...plainOrder.slice(0, mid + 1), ...plainOrder.slice(mid - 1)], fewer = plainOrder.filter(i => i !== Math.min(5, L - 1));
const STEPS = [
  ['An order', 'A model is its layers, and an order says which of them run, one after the other. Nothing forbids to name a layer twice. ' +
    'Press, and the middle two come a second time among the tiles, with the same weights. Do the right answers fall below the line?',
   () => `Run layers ${mid - 1} and ${mid} twice`, () => scene({order: twice}), () => `model(tokens, order=[${twice.join(', ')}])`],
  ['Leave one out', 'Take one layer away and see who misses it. If few answers fall, the layer did little that others could not do. ' +
    'Compare the bar with the line, which marks the whole model.',
   () => `Leave out layer ${Math.min(5, L - 1)}`, () => scene({order: fewer}), () => `model(tokens, order=[${fewer.join(', ')}])`],
  ['The staircase', 'As a rule a layer makes one look-up, after a first layer that notes which name stands where. So two layers have no room for three aliases: one is left for four look-ups. ' +
    `By that count ${inWords(L)} layers have room for ${inWords(L - 2)} aliases. The bar falls after three because the puzzles of the training ended there.`,
   () => 'Ask a hundred puzzles of each kind', () => scene({all: true}),
   () => "of_questions(model, tokenizer, few_shot('toy_assign', 100, shots=0, depth=3))[0].mean"],
  ['How it grew', `This model, ${grown.name}, began its training with ${inWords(about.models[grown.stages[0]].layers)} layers. Growing repeats a block of them, at first both and later the middle, and gives the copies their own weights. At that moment ` +
    'it computes what the small model would compute in the longer order, and then each copy learns for itself. You see each stage before it grew on: the first two still guess. “Was” names the layer of the stage before.',
   () => Number($('stage').value) === 0 && current() !== deep ? 'Grow' : current() === deep || runNow() !== grown ? 'Begin with the first stage' : 'Grow again',
   () => { const at = grown.stages.indexOf(current()); wide = true; pick(grown.stages[current() === deep || at < 0 ? 0 : at + 1]); question?.task === 'toy_assign/3' ? refresh() : ask(3); },
   () => about.models[current()].copies ? `model = untie(model, [${about.models[current()].copies.join(', ')}])` : 'model = LM(ModelConfig(n_layer=2))', grown.stages.length > 1],
  ['Loop the middle', 'A frozen model may run its middle four layers again. Naively, each pass adds its whole change, so the later layers get what they were not trained on: look at 0 to 3 aliases. By small steps, each pass adds ' +
    'a fourth of its change, worked out anew from where the last one ended. The sum stays near one pass, so the later layers still understand it. But the way there is finer, and with four aliases that gains answers.',
   () => state().wrap?.solver === 'naive' ? 'Now by small steps' : `Loop layers ${mid - 2} to ${mid + 1} four times, naively`,
   () => scene({depth: 4, all: true, wrap: {window: `mid${Math.min(4, L)}`, solver: state().wrap?.solver === 'naive' ? 'rk' : 'naive', K: 4, T: '', beta: ''}}),
   () => `with ${wrapText(state().wrap || {window: `mid${Math.min(4, L)}`, solver: 'naive', K: 4})}:\n    model(tokens)`],
  ['A core with a dial', `This is another model, ${runOf(recurrent)?.name}, cut from an ordinary one: ${(about.models[recurrent]?.parts || []).map((part, k) => `${inWords(part.length)} ${['layers read', 'are a core that runs as often as you like', 'answer'][k]}`).join(', ')}. After a little training on deeper puzzles ` +
    'the dial “core runs” (r in the code) decides how many steps it takes. Try 1, then 4, then 8 and 16: does more help for ever?',
   () => `Run the core ${runs() === 1 && core() ? 4 : 1} time${runs() === 1 && core() ? 's' : ''}`, () => scene({of: recurrent, depth: 4, r: core() && runs() === 1 ? 4 : 1}),
   () => `core_of(model).r = ${core() ? runs() : 1}\nmodel(tokens)`, Boolean(recurrent)],
].filter(found => found[5] !== false && (ordinary || found[0].includes('dial')));

// ---- what is pressed, and how the page begins
$('ask').onclick = () => ask();
$('all').onclick = () => { wide = true; refresh(); };
$('depth').onchange = () => ask();
$('r').oninput = () => { how = {r: Number($('r').value)}; draw(); refresh(); };
$('model').onchange = () => { pick(runNow().stages.at(-1)); refresh(); };
$('stage').oninput = () => { pick(current()); refresh(); };
$('prompt').oninput = () => { clearTimeout(timer); number++; question = undefined; timer = setTimeout(refresh, 150); };
$('model').replaceChildren(...about.runs.map(run => make('option', {textContent: run.name})));
$('K').value = $('K').defaultValue = 4;
$('text').placeholder = $('typed').textContent = `${mid - 1}-2x2-${L - mid - 1}`;
$('means').textContent = `${mid - 1} layers, the next 2 twice in a row, and the last ${L - mid - 1}`;
$('colours').textContent = 'Where a colour comes twice, the same layer runs twice, or the layers began as copies (if the page knows how the model grew).';
$('what').replaceChildren('A language model of ', make('b', {textContent: `${(about.models[deep].parameters / 1e6).toFixed(1)} million parameters`}), ' that a laptop trained in a few minutes. Its ',
  make('b', {textContent: `${inWords(L)} layers`}), ' are yours to move.');
pick(deep);
$('depth').value = about.task.split('/')[1] || 0;
const open = () => { if (fromLink()) { draw(); refresh(); } else ask(); };
onhashchange = open;
open();
