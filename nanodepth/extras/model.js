// What the page asks, answered in a worker: model.py, retrofit.py and wrapper.py in plain JavaScript.
// A stream is an array of T rows of n_embd numbers, one row for each token.

// A tensor is rows of floats. The page has eight bits for each, and for each row a scale.
function widened({rows, columns, at}, raw) {
  const scales = new Float32Array(raw, at, rows), numbers = new Int8Array(raw, at + 4 * rows, rows * columns), floats = new Float64Array(rows * columns);
  for (let i = 0; i < floats.length; i++) floats[i] = numbers[i] * scales[Math.floor(i / columns)];
  return {rows, columns, floats, row: i => floats.subarray(i * columns, (i + 1) * columns)};
}

// (T, I) -> (T, O), nearly all the work: of four tokens at once, as reading a weight costs as much as using it
function linear({rows: O, columns: I, floats: W}, x) {
  const T = x.length / I, y = new Float64Array(T * O), far = t => Math.min(t, T - 1);
  for (let t = 0; t < T; t += 4) for (let o = 0, [a, b, c, d] = [t, t + 1, t + 2, t + 3].map(far); o < O; o++) {
    let p = 0, q = 0, r = 0, s = 0;
    for (let i = 0; i < I; i++) {
      const w = W[o * I + i];
      p += w * x[a * I + i]; q += w * x[b * I + i]; r += w * x[c * I + i]; s += w * x[d * I + i];
    }
    y[a * O + o] = p; y[b * O + o] = q; y[c * O + o] = r; y[d * O + o] = s;
  }
  return y;
}

const NONE = new Float64Array(0), newCache = () => ({position: 0, slots: []});
const branch = cache => ({position: cache.position, slots: cache.slots.map(slot => ({...slot}))});
const add = (x, y) => x.map((v, i) => v + y[i]), lerp = (x, y, share) => x.map((v, i) => v + share * (y[i] - v));
function joined(...parts) {
  const all = new Float64Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => { all.set(part, at); return at + part.length; }, 0);
  return all;
}
function rmsNorm({floats: w}, x, eps) {
  const C = w.length, y = new Float64Array(x.length);
  for (let t = 0; t < x.length; t += C) {
    let sum = 0;
    for (let i = 0; i < C; i++) sum += x[t + i] ** 2;
    const scale = 1 / Math.sqrt(sum / C + eps);
    for (let i = 0; i < C; i++) y[t + i] = x[t + i] * scale * w[i];
  }
  return y;
}
function softmax(x) {
  const most = x.reduce((a, b) => Math.max(a, b)), e = x.map(v => Math.exp(v - most)), sum = e.reduce((a, b) => a + b);
  return e.map(v => v / sum);
}

class LM {
  constructor({config, order, r, parts, tensors}, raw) {
    const weights = Object.fromEntries(Object.entries(tensors).map(([name, place]) => [name, widened(place, raw)]));
    Object.assign(this, config, {order, r, parts, weights});
  }
  weight(name) { return this.weights[`${name}.weight`]; }
  norm(name, x) { return rmsNorm(this.weight(name), x, this.norm_eps); }
  head(x) { return linear(this.weight('head'), this.norm('norm', x)); }
  embed(tokens) { return joined(...tokens.map(token => this.weight('embed').row(token))); }

  rotate(x, heads, start) {             // turn each pair of channels by its position's angle
    const hd = this.head_dim, half = hd / 2;
    for (let t = 0; t < x.length / heads / hd; t++) for (let i = 0; i < half; i++) {
      const angle = (start + t) / this.rope_theta ** (i / half), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let h = 0; h < heads; h++) {
        const at = (t * heads + h) * hd + i, a = x[at], b = x[at + half];
        x[at] = a * cos - b * sin; x[at + half] = b * cos + a * sin;
      }
    }
    return x;
  }

  attention(name, x, slot, start, keep) {
    const {n_head: H, n_kv_head: G, head_dim: hd} = this, made = part => linear(this.weight(`${name}.${part}`), x);
    const q = this.rotate(made('q'), H, start), y = new Float64Array(q.length);
    const before = old => old.subarray(0, start * G * hd);      // of the tokens before these
    const keys = joined(before(slot.keys), this.rotate(made('k'), G, start)), values = joined(before(slot.values), made('v'));
    if (keep) Object.assign(slot, {keys, values});
    for (let t = 0; t < x.length / this.n_embd; t++) for (let h = 0; h < H; h++) {
      const at = (t * H + h) * hd, g = Math.floor(h * G / H) * hd, scores = new Float64Array(start + t + 1);
      for (let s = 0; s < scores.length; s++) {
        let sum = 0;
        for (let i = 0, from = s * G * hd + g; i < hd; i++) sum += q[at + i] * keys[from + i];
        scores[s] = sum / Math.sqrt(hd);
      }
      softmax(scores).forEach((share, s) => { for (let i = 0, from = s * G * hd + g; i < hd; i++) y[at + i] += share * values[from + i]; });
    }
    return linear(this.weight(`${name}.o`), y);
  }

  mlp(name, x) {
    const [gate, up] = ['gate', 'up'].map(part => linear(this.weight(`${name}.${part}`), x));
    return linear(this.weight(`${name}.down`), gate.map((v, i) => v / (1 + Math.exp(-v)) * up[i]));
  }

  // Run layers on the stream; the first stands at place `depth` of the order. Without `keep` the
  // cache is only read, as later evaluations of a looped window do.
  run(x, order, depth, cache, tap, keep = true) {
    order.forEach((i, k) => {
      const slot = cache.slots[depth + k] ??= {keys: NONE, values: NONE}, layer = `layers.${i}`;
      x = add(x, this.attention(`${layer}.attn`, this.norm(`${layer}.attn_norm`, x), slot, cache.position, keep));
      x = add(x, this.mlp(`${layer}.mlp`, this.norm(`${layer}.mlp_norm`, x)));
      tap?.(i, x);
    });
    return x;
  }

  hidden(tokens, {order = this.order, wrap, r = this.r, cache = newCache(), tap} = {}) {
    let x = this.embed(tokens);
    if (this.parts) x = this.recur(x, r, cache, tap);
    else {
      const [a, b] = wrap ? wrap.window : [order.length, order.length];
      x = this.run(x, order.slice(0, a), 0, cache, tap);
      if (wrap) {                       // the window by a solver; the cache keeps the first pass
        let first = true;
        const g = stream => {
          const out = this.run(stream, order.slice(a, b + 1), a, cache, tap, first);
          first = false;
          return out;
        };
        x = SOLVERS[wrap.solver](g, x, wrap.K, wrap.T, wrap.beta);
        x = this.run(x, order.slice(b + 1), b + 1, cache, tap);
      }
    }
    cache.position += tokens.length;
    return x;
  }

  recur(x, r, cache, tap) {             // prelude; r times adapter and core; coda
    const [prelude, core, coda] = this.parts, C = this.n_embd, T = x.length / C, row = (x, t) => x.subarray(t * C, (t + 1) * C);
    const e = this.run(x, prelude, 0, cache, tap);
    let s = this.weights.first_states.floats.slice(cache.position * C, (cache.position + T) * C);
    for (let k = 0; k < r; k++) {
      const mixed = joined(...[...Array(T).keys()].flatMap(t => [row(s, t), row(e, t)]));
      s = this.run(this.weight('spans.0.adapter') ? linear(this.weight('spans.0.adapter'), mixed) : add(s, e), core, prelude.length + k * core.length, cache, tap);
    }
    return this.run(s, coda, prelude.length + r * core.length, cache, tap);
  }
}

const SOLVERS = {               // as in wrapper.py: g is one pass through the window
  naive(g, x, K) { for (let k = 0; k < K; k++) x = g(x); return x; },
  euler(g, x, K, T = 1) { for (let k = 0; k < K; k++) x = lerp(x, g(x), T / K); return x; },
  rk(g, x, K, T = 1, beta = 0.5) {
    const anchor = g(x);
    x = lerp(x, anchor, T / K);
    for (let k = 1; k < K; k++) x = lerp(x, g(x), T / K);
    return lerp(x, anchor, beta);
  },
};

// ---- what the page may ask

const MOST = 200;               // layers of an order
let about, opened = Object.create(null), last = {};     // a model may be called `constructor`
const encode = text => [...about.start, ...new TextEncoder().encode(text)], shown = i => about.shown[i];

function open(name) {           // a model, when it is first asked
  return opened[name] ??= new LM(about.models[name], Uint8Array.from(atob(about.weights[name]), letter => letter.charCodeAt(0)).buffer);
}

function checked(model, given) {                // how it runs, and which layers one after the other
  const fail = text => { throw Error(text); };
  if (model.parts) {
    const r = given.r ?? model.r, [prelude, core, coda] = model.parts;
    if (!(Number.isInteger(r) && r >= 1 && r <= 32)) fail('r is 1 to 32');
    const order = [...prelude, ...Array(r).fill(core).flat(), ...coda];
    return {how: {r}, order, layers: order.length};
  }
  const order = given.order || model.order, n = model.n_layer, depth = order.length;
  if (!depth || depth > MOST) fail(`an order has 1 to ${MOST} layers`);
  const wrong = order.find(i => !(Number.isInteger(i) && 0 <= i && i < n));
  if (wrong !== undefined) fail(`the order names layer ${wrong}, but the layers are 0 to ${n - 1}`);
  if (!given.wrap) return {how: {order}, order, layers: depth};
  const {window, solver = 'rk', K = 3, T, beta} = given.wrap, [a, b] = /^\d+-\d+$/.test(window) ? window.split('-').map(Number) : [];
  if (!(0 <= a && a <= b && b < depth)) fail(`window=${window}: give first-last within 0 to ${depth - 1}, or mid4`);
  const within = (value, least, most) => value === undefined || value >= least && value <= most;
  if (K % 1 || !within(K, 1, 16) || !within(T, 1e-6, 1000) || !within(beta, 0, 1) || !SOLVERS[solver])
    fail('K is 1 to 16, T is above 0 and at most 1,000, beta is 0 to 1, the solver naive, euler or rk');
  if (solver === 'naive' && T !== undefined || solver !== 'rk' && beta !== undefined) fail(`${solver} has no such dial: leave it empty`);
  return {how: {order, wrap: {window: [a, b], solver, K, T, beta}}, order, layers: depth + (K - 1) * (b - a + 1)};
}

function likely(model, stream, k) {             // of each token, the k likeliest next ones, the likeliest first
  const V = model.vocab_size, logits = model.head(stream);
  return Array.from({length: logits.length / V}, (_, t) => {
    const p = softmax(logits.subarray(t * V, (t + 1) * V));
    return [...p.keys()].sort((a, b) => p[b] - p[a] || a - b).slice(0, k).map(i => [shown(i), p[i], i]);
  });
}

// A prompt that was read in some way, with the stream behind each layer, for all that is asked of it.
function reading({model: name, how: given, prompt}) {
  const key = JSON.stringify([name, given, prompt]);
  if (last.key !== key) {
    const model = open(name), tokens = encode(prompt), {how, order, layers} = checked(model, given), streams = [], cache = newCache();
    if (!prompt || tokens.length > model.context) throw Error(`the prompt has ${tokens.length - 1} bytes: 1 to ${model.context - 1} fit`);
    const stream = model.hidden(tokens, {...how, cache, tap: (layer, x) => streams.push({layer, x})});
    last = {key, model, how, order, layers, tokens, streams, stream, cache};
  }
  return last;
}

const ANSWERS = {
  order({model, text}) {                        // a notation, or layers by number
    const n = open(model).n_layer, order = [];
    let unique = 0;
    if (/[, ]/.test(text.trim())) order.push(...text.split(/[, ]+/).filter(Boolean).map(Number));
    else for (const part of text.replaceAll('×', 'x').split('-')) {
      const [, size, times = 1] = /^([1-9]\d*)(?:x([1-9]\d*))?$/.exec(part) || [];
      if (!size || size * times > MOST) throw Error(`'${part}' in the loop '${text}' is neither layers, such as 4, nor a block by times, such as 4x6`);
      for (let t = 0; t < times; t++) for (let i = 0; i < size; i++) order.push(unique + i);
      unique += Number(size);
    }
    if (unique && unique !== n) throw Error(`the parts of '${text}' make ${unique} layers, but the model has ${n}`);
    return {order: checked(open(model), {order}).order};
  },
  // each part is asked for by itself, so that a change need not wait for all of it
  next(asked) {
    const {model, stream, tokens, order, layers} = reading(asked);
    return {next: likely(model, stream.slice(-model.n_embd), 40)[0], order, layers, tokens: tokens.map(shown)};
  },
  loss(asked) {
    const {model, stream, tokens} = reading(asked), V = model.vocab_size, logits = model.head(stream.slice(0, -model.n_embd));
    return tokens.slice(1).reduce((sum, token, t) => sum - Math.log(softmax(logits.subarray(t * V, (t + 1) * V))[token]), 0) / (tokens.length - 1);
  },
  layer(asked) {                                // what the layer at a place of the run would say after each of the last n tokens
    const {model, streams} = reading(asked), {layer, x} = streams[asked.at], says = likely(model, x.slice(-asked.n * model.n_embd), 10);
    return {layer, says: says.map(row => row[0]), ten: says.at(-1).map(([, , i]) => i), of: streams.length};
  },
  write(asked) {                                // one more token of the text that it goes on with
    const found = reading(asked), {model, how} = found;
    found.after ??= {tokens: [], cache: branch(found.cache), stream: found.stream.slice(-model.n_embd)};
    const {tokens, cache, stream} = found.after;
    if (found.tokens.length + tokens.length < model.context) {
      const [[[, , token]]] = likely(model, stream, 1);
      tokens.push(token);
      found.after.stream = model.hidden([token], {...how, cache});
    }
    return tokens.map(i => i < 256 ? String.fromCharCode(i) : shown(i)).join('');
  },
  measure({model: name, how, task, first, last}) {      // some of the questions: is the likeliest option, a byte, the right one?
    const model = open(name), {how: way} = checked(model, how), asked = about.questions[task].slice(first, last);
    const right = asked.filter(({prompt, options, answer}) => {
      const logits = model.head(model.hidden(encode(prompt), way).slice(-model.n_embd)), values = options.map(text => logits[text.charCodeAt(0)]);
      return values.indexOf(Math.max(...values)) === answer;
    });
    return {right: right.length, questions: asked.length};
  },
};

globalThis.onmessage = ({data: {id, name, body}}) => {
  try {
    if (name === 'begin') about = body;
    else postMessage({id, answer: ANSWERS[name](body)});
  } catch (error) { postMessage({id, error: error.message}); }
};
