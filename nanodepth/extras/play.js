// What the page asks, answered: model.py, retrofit.py and wrapper.py in plain JavaScript, in a worker.
// A sequence is a Float32Array of T rows; only the map of a prompt has several, one after the other.

// ---- a multiplication by a matrix, which is nearly all the work: WebAssembly takes four numbers at once

const SCRATCH = 1 << 20, BLOCK = 32;    // numbers for what goes in, and as many for what comes out; weights that share a scale
let memory, kernels = {}, free;

function prepare({bytes, scales}) {     // room for what goes in and comes out, for the weights, and for their scales as floats
  free = 9 * SCRATCH + bytes;
  memory = new WebAssembly.Memory({initial: Math.ceil((free + 4 * scales) / 65536) + 1});
  try {
    for (const bits of [4, 8]) for (const n of [1, 4])
      kernels[`${bits} ${n}`] = new WebAssembly.Instance(new WebAssembly.Module(kernel(bits, n)), {m: {m: memory}}).exports.f;
  } catch { kernels = {}; }             // a browser without vectors: `linear` does it by itself
}

// The program f(W, S, M, B, x, y, I, O): y[k, o] = sum over i of weight[o, i] x[k, i], for n tokens k
// at once. A weight is a number of W times its block's scale in S; with four bits its block's minimum
// in M is added, so M times the block's sum of x, which is in B. All are places in memory. With four
// tokens each has a sum, with one token four numbers have one each: no sum waits for the one before.
function kernel(bits, n) {
  const leb = n => n < 128 ? [n] : [n & 127 | 128, ...leb(n >>> 7)], simd = (code, ...rest) => [0xfd, ...leb(code), ...rest];
  const get = i => [0x20, i], set = i => [0x21, i], int = n => [0x41, n & 127 | 128, n >> 7], add = 0x6a, mul = 0x6c;
  const plus = (i, ...by) => [...get(i), ...by, add, ...set(i)], load = offset => simd(0, 4, offset), float = offset => [0x2a, 2, offset];
  const [W, S, M, B, x, y, I, O, o, w, s, m, b, end, out] = Array(15).keys(), tokens = [15, 16, 17, 18].slice(0, n);
  const sums = [19, 20, 21, 22], parts = [23, 24, 25, 26], v = 27, half = 28, four = 29, totals = [30, 31, 32, 33];
  const times = simd(0xe6), sum = simd(0xe4), zero = simd(12, ...Array(16).fill(0)), fifteen = simd(12, ...Array(16).fill(15));
  const loop = (begin, body, step, limit) =>        // do body, step while begin < limit
    [0x03, 0x40, ...body, ...step, ...get(begin), ...get(limit), 0x49, 0x0d, 0, 0x0b];
  const sixteen = second => [...get(w), ...load(0), ...(second ? [...int(4), ...simd(0x6d)] : [...fifteen, ...simd(0x4e)]), ...set(half)];
  const eight = j => bits === 8 ? [...get(w), ...simd(1, 3, 4 * j), ...set(v)]          // the next eight, to 16 bits each
    : [...(j % 4 ? [] : sixteen(j)), ...get(half), ...simd(0x89 + j % 4 / 2), ...set(v)];
  const widened = j => [...(j % 2 ? [] : eight(j)), ...get(v), ...simd(0xa7 + j % 2), ...simd(0xfa), ...set(four)];     // four of them, to floats
  const part = j => [...widened(j), ...tokens.flatMap((token, k) => {
    const of = parts[n > 1 ? k : j % 4];
    return [...get(of), ...get(four), ...get(token), ...load(16 * j), ...times, ...sum, ...set(of)];
  })];
  const found = k => n > 1 ? get(parts[k]) : [...get(parts[0]), ...parts.slice(1).flatMap(p => [...get(p), ...sum])];
  const block = [...parts.flatMap(p => [...zero, ...set(p)]), ...[0, 1, 2, 3, 4, 5, 6, 7].flatMap(part), ...tokens.flatMap((_, k) => [
    ...get(sums[k]), ...found(k), ...get(s), ...float(0), ...simd(0x13), ...times, ...sum, ...set(sums[k]),
    ...(bits === 8 ? [] : [...get(totals[k]), ...get(m), ...float(0), ...get(b), ...float(4 * k), 0x94, 0x92, ...set(totals[k])])])];
  const next = [...plus(w, ...int(4 * bits)), ...plus(s, ...int(4)), ...plus(m, ...int(4)), ...plus(b, ...int(4 * n)), ...tokens.flatMap(token => plus(token, ...int(128)))];
  const total = k => [...get(totals[k]), ...[0, 1, 2, 3].flatMap(lane => [...get(sums[k]), ...simd(0x1f, lane), 0x92])];
  const row = [...get(w), ...get(I), ...(bits === 8 ? [] : [...int(1), 0x76]), add, ...set(end), ...get(B), ...set(b),
    ...tokens.flatMap((token, k) => [...get(x), ...get(I), ...int(4 * k), mul, add, ...set(token), ...zero, ...set(sums[k]), 0x43, 0, 0, 0, 0, ...set(totals[k])]),
    ...loop(w, block, next, end), ...get(y), ...get(o), ...int(4), mul, add, ...set(out),
    ...tokens.flatMap((_, k) => [...get(out), ...total(k), 0x38, 2, 0, ...plus(out, ...get(O), ...int(4), mul)])];
  const body = [...[[W, w], [S, s], [M, m]].flatMap(([from, to]) => [...get(from), ...set(to)]), ...loop(o, row, plus(o, ...int(1)), O), 0x0b];
  const section = (id, bytes) => [id, ...leb(bytes.length), ...bytes], code = [3, 11, 0x7f, 11, 0x7b, 4, 0x7d, ...body];
  return new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, ...section(1, [1, 0x60, 8, ...Array(8).fill(0x7f), 0]),
    ...section(2, [1, 1, 109, 1, 109, 2, 0, 1]), ...section(3, [1, 0]), ...section(7, [1, 1, 102, 0, 0]),
    ...section(10, [1, ...leb(code.length), ...code])]);
}

const HALF = Float32Array.from({length: 65536}, (_, h) => {     // what 16 bits mean
  const e = h >> 10 & 31, part = (h & 1023) / 1024;
  return (h >> 15 ? -1 : 1) * (e ? 2 ** (e - 15) * (1 + part) : 2 ** -14 * part);
});
function widenedHalves(place, length) {
  const floats = new Float32Array(memory.buffer, free, length), halves = new Uint16Array(memory.buffer, place, length);
  for (let i = 0; i < length; i++) floats[i] = HALF[halves[i]];
  free += 4 * length;
  return floats;
}

// A tensor: rows of blocks of 32 numbers, each block with a scale, and with a minimum if it has four bits.
class Tensor {
  constructor({rows, columns, bits, at, scales, minima}, begin) {
    const blocks = Math.ceil(columns / BLOCK);
    Object.assign(this, {rows, columns, bits, blocks, width: BLOCK * blocks});
    if (bits === 32) { this.floats = new Float32Array(memory.buffer, begin + at, columns); return; }
    this.numbers = new (bits === 8 ? Int8Array : Uint8Array)(memory.buffer, begin + at, rows * this.width * bits / 8);
    this.scales = widenedHalves(begin + scales, rows * blocks);
    if (bits === 4) this.minima = widenedHalves(begin + minima, rows * blocks);
  }
  row(i) {
    if (this.bits === 32) return this.floats;
    return Float32Array.from({length: this.columns}, (_, c) => {
      const block = i * this.blocks + (c >> 5), j = c & 31;
      if (this.bits === 8) return this.numbers[BLOCK * block + j] * this.scales[block];
      return (this.numbers[BLOCK / 2 * block + j % 16] >> (j < 16 ? 0 : 4) & 15) * this.scales[block] + this.minima[block];
    });
  }
}

function linear(W, x, T) {                                      // (T, columns) -> (T, rows)
  const {width: I, columns, rows: O, bits, blocks} = W, y = new Float32Array(T * O);
  for (let t = 0, n; t < T; t += n) {
    n = kernels['4 4'] && T - t >= 4 ? 4 : 1;
    const from = new Float32Array(memory.buffer, 0, n * I), sums = new Float32Array(memory.buffer, 8 * SCRATCH, n * blocks), to = new Float32Array(memory.buffer, 4 * SCRATCH, n * O);
    from.fill(0);
    for (let k = 0; k < n; k++) from.set(x.subarray((t + k) * columns, (t + k + 1) * columns), k * I);
    if (kernels['4 4']) {
      for (let k = 0; k < n; k++) for (let b = 0; b < blocks; b++) {
        let sum = 0;
        for (let i = k * I + BLOCK * b, end = i + BLOCK; i < end; i++) sum += from[i];
        sums[b * n + k] = sum;
      }
      kernels[`${bits} ${n}`](W.numbers.byteOffset, W.scales.byteOffset, W.minima?.byteOffset || 0, 8 * SCRATCH, 0, 4 * SCRATCH, I, O);
    } else for (let o = 0; o < O; o++) to[o] = W.row(o).reduce((sum, v, i) => sum + v * from[i], 0);
    for (let k = 0; k < n; k++) y.set(to.subarray(k * O, (k + 1) * O), (t + k) * O);
  }
  return y;
}

// ---- the model, as in model.py and retrofit.py

const add = (x, y) => x.map((v, i) => v + y[i]);
function joined(parts) {
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => { all.set(part, at); return at + part.length; }, 0);
  return all;
}
const lerp = (x, y, share) => x.map((v, i) => v + share * (y[i] - v));

function rmsNorm(w, x, eps) {
  const C = w.length, y = new Float32Array(x.length);
  for (let t = 0; t < x.length; t += C) {
    let sum = 0;
    for (let i = 0; i < C; i++) sum += x[t + i] ** 2;
    const scale = 1 / Math.sqrt(sum / C + eps);
    for (let i = 0; i < C; i++) y[t + i] = x[t + i] * scale * w[i];
  }
  return y;
}

function softmax(x) {
  const e = new Float32Array(x.length);
  let most = -Infinity, sum = 0;
  for (const v of x) if (v > most) most = v;
  for (let i = 0; i < x.length; i++) sum += e[i] = Math.exp(x[i] - most);
  for (let i = 0; i < x.length; i++) e[i] /= sum;
  return e;
}

class LM {
  constructor(about, weights) {
    Object.assign(this, about.config, {order: about.order, r: about.r, parts: about.parts, weights, vectors: {}});
    const half = this.head_dim / 2, n = this.context * half;
    this.cos = new Float64Array(n); this.sin = new Float64Array(n);
    for (let t = 0; t < this.context; t++) for (let i = 0; i < half; i++) {
      const angle = t / this.rope_theta ** (i / half);
      this.cos[t * half + i] = Math.cos(angle); this.sin[t * half + i] = Math.sin(angle);
    }
  }
  weight(name) { return this.weights[`${name}.weight`]; }
  norm(name, x) { return rmsNorm(this.vectors[name] ??= this.weight(name).row(0), x, this.norm_eps); }
  head(x) { return linear(this.weight('head'), this.norm('norm', x), x.length / this.n_embd); }

  rotate(x, heads, T, start) {          // turn each pair of channels by its position's angle
    const hd = this.head_dim, half = hd / 2;
    for (let t = 0; t < x.length / heads / hd; t++) for (let h = 0; h < heads; h++) for (let i = 0; i < half; i++) {
      const cos = this.cos[(start + t % T) * half + i], sin = this.sin[(start + t % T) * half + i];
      const at = (t * heads + h) * hd + i, a = x[at], b = x[at + half];
      x[at] = a * cos - b * sin; x[at + half] = b * cos + a * sin;
    }
    return x;
  }

  // of sequences of T tokens each, one after the other; only a single one goes on from a cache
  attention(name, x, T, slot, start, keep) {
    const {n_head: H, n_kv_head: G, head_dim: hd} = this, N = x.length / this.n_embd;
    const normed = (part, x) => this.qk_norm ? this.norm(`${name}.${part}_norm`, x) : x;        // Qwen 3's
    const made = part => {
      const y = linear(this.weight(`${name}.${part}`), x, N), bias = this.weights[`${name}.${part}.bias`]?.row(0);     // Qwen 2's
      return bias ? y.map((v, i) => v + bias[i % bias.length]) : y;
    };
    const q = this.rotate(normed('q', made('q')), H, T, start), k = this.rotate(normed('k', made('k')), G, T, start), v = made('v');
    const join = (old, fresh) => {      // the tokens before these, and these
      const all = new Float32Array((start + N) * G * hd), before = start * G * hd;
      all.set(old.subarray(0, before)); all.set(fresh, before);
      return all;
    };
    const keys = join(slot.keys, k), values = join(slot.values, v), y = new Float32Array(N * H * hd);
    if (keep) Object.assign(slot, {keys, values});
    for (let t = 0; t < N; t++) for (let h = 0; h < H; h++) {
      const at = (t * H + h) * hd, g = (t - t % T) * G * hd + Math.floor(h * G / H) * hd, seen = start + t % T + 1;
      const scores = new Float32Array(seen);
      for (let s = 0; s < seen; s++) {
        let sum = 0;
        for (let i = 0, from = s * G * hd + g; i < hd; i++) sum += q[at + i] * keys[from + i];
        scores[s] = sum / Math.sqrt(hd);
      }
      const shares = softmax(scores);
      for (let s = 0; s < seen; s++)
        for (let i = 0, from = s * G * hd + g; i < hd; i++) y[at + i] += shares[s] * values[from + i];
    }
    return linear(this.weight(`${name}.o`), y, N);
  }

  mlp(name, x) {
    const T = x.length / this.n_embd;
    const gate = linear(this.weight(`${name}.gate`), x, T), up = linear(this.weight(`${name}.up`), x, T);
    for (let i = 0; i < gate.length; i++) gate[i] = gate[i] / (1 + Math.exp(-gate[i])) * up[i];
    return linear(this.weight(`${name}.down`), gate, T);
  }

  // Run layers on the stream; the first stands at position `depth` of the order. Without `keep` the
  // cache is only read, as later evaluations of a looped window do.
  run(x, order, depth, cache, tap, keep = true, T = x.length / this.n_embd) {
    order.forEach((i, k) => {
      const slot = cache.slots[depth + k] ??= {keys: NONE, values: NONE}, layer = `layers.${i}`;
      x = add(x, this.attention(`${layer}.attn`, this.norm(`${layer}.attn_norm`, x), T, slot, cache.position, keep));
      x = add(x, this.mlp(`${layer}.mlp`, this.norm(`${layer}.mlp_norm`, x)));
      tap?.(i, x);
    });
    return x;
  }

  embed(tokens) { return joined(tokens.map(token => this.weight('embed').row(token))); }

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
    const [prelude, core, coda] = this.parts, C = this.n_embd, T = x.length / C;
    const e = this.run(x, prelude, 0, cache, tap), mixed = new Float32Array(2 * T * C);
    let s = new Float32Array(T * C);
    for (let t = 0; t < T; t++) s.set(this.weights.first_states.row(cache.position + t), t * C);
    for (let k = 0; k < r; k++) {
      for (let t = 0; t < T; t++) {
        mixed.set(s.subarray(t * C, (t + 1) * C), 2 * t * C);
        mixed.set(e.subarray(t * C, (t + 1) * C), (2 * t + 1) * C);
      }
      const entered = this.weight('adapter') ? linear(this.weight('adapter'), mixed, T) : add(s, e);
      s = this.run(entered, core, prelude.length + k * core.length, cache, tap);
    }
    return this.run(s, coda, prelude.length + r * core.length, cache, tap);
  }
}

const NONE = new Float32Array(0);
const newCache = () => ({position: 0, slots: []});
const branch = cache => ({position: cache.position, slots: cache.slots.map(slot => ({...slot}))});

// ---- the wrapper, as in wrapper.py: g is one pass through the window

const SOLVERS = {
  naive(g, x, K) {
    for (let k = 0; k < K; k++) x = g(x);
    return x;
  },
  euler(g, x, K, T = 1) {
    for (let k = 0; k < K; k++) x = lerp(x, g(x), T / K);
    return x;
  },
  rk(g, x, K, T = 1, beta = 0.5) {
    const anchor = g(x);
    x = lerp(x, anchor, T / K);
    for (let k = 1; k < K; k++) x = lerp(x, g(x), T / K);
    return lerp(x, anchor, beta);
  },
};

// ---- text to tokens: bytes, or pairs of neighbours that are merged, as `tokenizers` does it

class Bytes {
  constructor({start, shown}) { this.start = start; this.texts = shown; }
  encode(text) { return [...this.start, ...new TextEncoder().encode(text)]; }
  text(tokens) { return tokens.map(i => i < 256 ? String.fromCharCode(i) : this.texts[i]).join(''); }
  shown(i) { return this.texts[i]; }
}

class Merging {
  constructor({vocab, merges, added, splits, nfc, whole, start}) {
    let odd = 256;                      // GPT-2 writes each byte as a letter
    this.letters = Array.from({length: 256}, (_, b) => String.fromCodePoint(33 <= b && b <= 126 || 161 <= b && b <= 172 || 174 <= b ? b : odd++));
    this.bytes = new Map(this.letters.map((letter, b) => [letter, b]));
    this.ids = new Map(vocab.map((text, i) => [text, i]));
    this.ranks = new Map(merges.map((pair, rank) => [pair, rank]));
    this.cuts = splits.map(text => new RegExp(text, 'gu'));
    this.special = new Map(Object.entries(added)); this.names = new Map(Object.entries(added).map(([text, i]) => [i, text]));
    const quoted = Object.keys(added).sort((a, b) => b.length - a.length).map(text => text.replace(/[|\\{}()[\]^$+*?.\/]/g, '\\$&'));
    this.names.size && (this.marks = new RegExp(quoted.join('|'), 'gu'));
    Object.assign(this, {vocab, nfc, whole, start, words: new Map()});
  }
  encode(text) {
    const parts = this.marks ? pieces(text, this.marks) : [text];
    return [...this.start, ...parts.flatMap(part => this.special.has(part) ? [this.special.get(part)]
      : this.cuts.reduce((list, cut) => list.flatMap(piece => pieces(piece, cut)), [this.nfc ? part.normalize('NFC') : part]).flatMap(word => this.merged(word)))];
  }
  merged(word) {                        // the pair of the lowest rank first, until no pair has one
    if (!this.words.has(word)) {
      let parts = [...new TextEncoder().encode(word)].map(b => this.letters[b]);
      if (this.whole && this.ids.has(parts.join(''))) parts = [parts.join('')];
      for (;;) {
        let best = Infinity, at;
        for (let k = 0; k + 1 < parts.length; k++) {
          const rank = this.ranks.get(`${parts[k]} ${parts[k + 1]}`);
          if (rank < best) { best = rank; at = k; }
        }
        if (best === Infinity) break;
        parts.splice(at, 2, parts[at] + parts[at + 1]);
      }
      this.words.set(word, parts.map(part => this.ids.get(part)));
    }
    return this.words.get(word);
  }
  decode(tokens) {
    const bytes = tokens.flatMap(i => this.names.has(i) ? [...new TextEncoder().encode(this.names.get(i))] : [...this.vocab[i] ?? ''].map(letter => this.bytes.get(letter)));
    return new Uint8Array(bytes);
  }
  text(tokens) { return new TextDecoder().decode(this.decode(tokens)).replace(/\ufffd+$/, ''); }      // without half a character at its end
  shown(i) {
    const bytes = this.decode([i]);
    try { return new TextDecoder('utf-8', {fatal: true}).decode(bytes); }
    catch { return `<${[...bytes].map(b => b.toString(16).toUpperCase()).join(' ')}>`; }        // a part of a character
  }
}

function pieces(text, cut) {            // what matches and what lies between, in order
  const found = [];
  let from = 0;
  for (const match of text.matchAll(cut)) {
    found.push(text.slice(from, match.index), match[0]);
    from = match.index + match[0].length;
  }
  return [...found, text.slice(from)].filter(Boolean);
}

// ---- what the page may ask, as in play.py

const MOST = 200, MOST_TOKENS = 256;       // layers of an order; tokens
let about, tokenizer, opened = Object.create(null), last = Object.create(null);    // a model may be called `constructor`

const middleOf = (depth, n) => about.middle[`${depth},${n}`] ?? Math.floor(depth / 2) - Math.floor(n / 2);      // as pick_window

function checked(model, given) {                // how it runs, and which layers one after the other
  if (model.parts) {
    const r = given.r ?? model.r, [prelude, core, coda] = model.parts;
    if (!(Number.isInteger(r) && r >= 1 && r <= 32)) throw Error('r is 1 to 32');
    return {how: {r}, order: [...prelude, ...Array(r).fill(core).flat(), ...coda], layers: prelude.length + r * core.length + coda.length};
  }
  const order = given.order || model.order, n = model.n_layer;
  if (!order.length || order.length > MOST) throw Error(`an order has 1 to ${MOST} layers`);
  const wrong = order.find(i => !(Number.isInteger(i) && 0 <= i && i < n));
  if (wrong !== undefined) throw Error(`the order names layer ${wrong}, but the layers are 0 to ${n - 1}`);
  if (!given.wrap) return {how: {order}, order, layers: order.length};
  const {window = 'mid4', solver = 'rk', K = 3, T, beta} = given.wrap, depth = order.length;
  const middle = /^mid(\d+)$/.exec(window), ends = /^(\d+)-(\d+)$/.exec(window);
  const size = middle && Number(middle[1]), start = middle && middleOf(depth, size);
  const [a, b] = middle ? [start, start + size - 1] : ends ? [Number(ends[1]), Number(ends[2])] : [];
  if (!(0 <= a && a <= b && b < depth)) throw Error(`window=${window}: give first-last within 0 to ${depth - 1}, or mid4`);
  const within = (value, least, most) => value === undefined || value >= least && value <= most;
  if (K % 1 || !within(K, 1, 16) || !within(T, 1e-6, 1000) || !within(beta, 0, 1) || !SOLVERS[solver])
    throw Error('K is 1 to 16, T is above 0 and at most 1,000, beta is 0 to 1, the solver naive, euler or rk');
  if (solver === 'naive' && T !== undefined || solver !== 'rk' && beta !== undefined)
    throw Error(`${solver} has no such dial: leave it empty`);
  return {how: {order, wrap: {window: [a, b], solver, K, T, beta}}, order, layers: depth + (K - 1) * (b - a + 1)};
}

function likely(model, stream, k) {             // of each token, the k likeliest next ones, the likeliest first
  const V = model.vocab_size, logits = model.head(stream), rows = [];
  for (let t = 0; t < logits.length; t += V) {
    const p = softmax(logits.subarray(t, t + V)), best = [];
    p.forEach((v, i) => {
      if (best.length === k && v <= p[best[k - 1]]) return;
      best.push(i); best.sort((a, b) => p[b] - p[a] || a - b);
      if (best.length > k) best.pop();
    });
    rows.push(best.map(i => [tokenizer.shown(i), p[i], i]));
  }
  return rows;
}

function tokensOf(model, prompt) {
  const tokens = tokenizer.encode(prompt), most = Math.min(model.context, MOST_TOKENS);
  if (!prompt) throw Error('the prompt is empty: type what the model shall read');
  if (tokens.length > most) throw Error(`the prompt has ${tokens.length} tokens, and at most ${most} fit`);
  return tokens;
}

// A prompt that was read in some way, with the stream behind each layer, for all that is asked of it.
function reading({model: name, how: given, prompt}) {
  const key = JSON.stringify([name, given, prompt]);
  if (last.key !== key) {
    const model = open(name), tokens = tokensOf(model, prompt), {how, order, layers} = checked(model, given), streams = [], cache = newCache();
    const stream = model.hidden(tokens, {...how, cache, tap: (layer, x) => streams.push({layer, x})});
    last = {key, model, how, order, layers, tokens, streams, stream, cache};
  }
  return last;
}

const ANSWERS = {
  weights({model, at, raw}) {                   // a part of them: letters of the page, or bytes of another worker
    const text = typeof raw === 'string' ? atob(raw) : '', bytes = text ? new Uint8Array(memory.buffer, begin(model) + at, text.length) : 0;
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    if (!text) new Uint8Array(memory.buffer).set(new Uint8Array(raw), begin(model) + at);
  },
  copied({model}) { return memory.buffer.slice(begin(model), begin(model) + about.lengths[model]); },      // for another worker
  order({model, text}) {                        // a notation, or layers by number
    const n = open(model).n_layer, order = [];
    let unique = 0;
    if (/[, ]/.test(text.trim())) order.push(...text.split(/[, ]+/).filter(Boolean).map(Number));
    else for (const part of text.replaceAll('×', 'x').split('-')) {
      const [, size, times] = /^(\d+)(?:x(\d+))?$/.exec(part) || [];
      if (size * (times || 1) > MOST) throw Error(`an order has at most ${MOST} layers, and '${part}' has ${size * (times || 1)}`);
      if (!Number(size) || times === '0')
        throw Error(`the loop '${text}' has a segment '${part}', which is neither layers, such as 4, nor layers by times, such as 4x6`);
      for (let t = 0; t < (times || 1); t++) for (let i = 0; i < size; i++) order.push(unique + i);
      unique += Number(size);
    }
    if (unique && unique !== n) throw Error(`the parts of '${text}' make ${unique} layers, but the model has ${n}`);
    return {order: checked(open(model), {order}).order};
  },
  // each part is asked for by itself, so that a change need not wait for all of it
  next(asked) {
    const {model, stream, tokens, order, layers} = reading(asked);
    return {next: likely(model, stream.slice(-model.n_embd), 40)[0], order, layers, tokens: tokens.map(i => tokenizer.shown(i))};
  },
  loss(asked) {
    const {model, stream, tokens} = reading(asked), V = model.vocab_size, C = model.n_embd, logits = model.head(stream.slice(0, -C));
    return -logLikelihood(tokens.slice(1), logits, V) / (tokens.length - 1);
  },
  layer(asked) {                                // what the layer at a place of the run would say after each of the last n tokens
    const {model, streams} = reading(asked), {layer, x} = streams[asked.at], C = model.n_embd;
    const says = likely(model, x.slice(-asked.n * C), asked.n > 1 ? 1 : 10);
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
    return tokenizer.text(tokens);
  },
  // Blocks of `size` layers run twice, beginning with layer `first` and the three after it; a block of
  // -1 layers leaves out the one before. The layers up to a block's end are read once. From there the
  // stream goes on with the block's first layer: the four streams go on together. Of each: where, the
  // wanted token's share, and what it says.
  scan({model: name, prompt, token, size, first}) {
    const {model, tokens, streams} = reading({model: name, how: {}, prompt}), T = tokens.length, C = model.n_embd, starts = [];
    let x = NONE;
    for (let layer = first; layer <= model.n_layer; layer++) {
      const end = layer + size - 1;             // the layer whose output is the block's
      if (layer < first + 4 && end < model.n_layer && layer + size > -1) { starts.push(layer); x = joined([x, end < 0 ? model.embed(tokens) : streams[end].x]); }
      if (layer < model.n_layer && x.length) x = model.run(x, [layer], 0, newCache(), undefined, false, T);
    }
    const ends = joined(starts.map((_, k) => x.subarray(((k + 1) * T - 1) * C, (k + 1) * T * C))), V = model.vocab_size, logits = model.head(ends);
    return starts.map((start, k) => { const p = softmax(logits.subarray(k * V, (k + 1) * V)), best = p.indexOf(p.reduce((a, b) => Math.max(a, b))); return [start, p[token], tokenizer.shown(best)]; });
  },
  wanted({model: name, prompt, text}) {         // the first token of a text behind the prompt
    const before = tokensOf(open(name), prompt), token = tokenizer.encode(prompt + text)[before.length];
    if (token === undefined) throw Error(`${JSON.stringify(text)} adds no token to the prompt`);
    return {token, text: tokenizer.shown(token)};
  },
  measure({model: name, how, task, first, last}) {      // some of the questions
    const model = open(name), {how: way} = checked(model, how), asked = about.questions[task].slice(first, last);
    return {right: asked.filter(q => chosen(model, way, q) === q.answer).length, questions: asked.length};
  },
};

function logLikelihood(tokens, logits, V) {     // of tokens, by the logits of the places before them
  return tokens.reduce((sum, token, t) => sum + Math.log(softmax(logits.slice(t * V, (t + 1) * V))[token]), 0);
}

function chosen(model, how, {prompt, options}) {     // the likeliest option; each is one byte, and so one token
  const logits = model.head(model.hidden(tokenizer.encode(prompt), how).slice(-model.n_embd)), values = options.map(text => logits[text.charCodeAt(0)]);
  return values.indexOf(Math.max(...values));
}

const begin = name => 9 * SCRATCH + about.begins[name];     // where the bytes of a model stand in memory

function open(name) {           // a model, when it is first asked
  return opened[name] ??= new LM(about.models[name], Object.fromEntries(
    Object.entries(about.tensors[name]).map(([key, place]) => [key, new Tensor(place, begin(name))])));
}

onmessage = ({data: {id, name, body}}) => {
  try {
    if (name === 'begin') { about = body; prepare(about); tokenizer = about.merges ? new Merging(about) : new Bytes(about); }
    else postMessage({id, answer: ANSWERS[name](body)});
  } catch (error) { postMessage({id, error: error.message}); }
};
