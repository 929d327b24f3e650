// Elements as plain data, and a patch of what differs: focus, scroll and transitions survive.

const SVG = "http://www.w3.org/2000/svg";
const kidsOf = new WeakMap();
const shown = (kid) => kid !== null && kid !== undefined && kid !== false && kid !== "";

// An element by its tag and classes, "p.quiet.small", then its attributes (null and false leave one
// out), then its kids: elements, text, or lists of them.
export function h(name, ...kids) {
  const [tag, ...classes] = name.split(".");
  const { key, ...attributes } = kids[0]?.constructor === Object && !kids[0].tag ? kids.shift() : {};
  if (classes.length) attributes.class = classes.join(" ");
  return { tag, key, attributes, kids: kids.flat(Infinity).filter(shown) };
}

// Make these the kids of an element. Text is never read as HTML. An element that never has kids is
// left to others: plots and counting clocks fill theirs themselves.
export function patch(parent, ...wanted) {
  const focus = document.activeElement;
  replace(parent, wanted.flat(Infinity).filter(shown));
  if (focus !== document.activeElement && focus?.isConnected) focus.focus({ preventScroll: true });
}

function replace(parent, wanted) {
  const before = kidsOf.get(parent) ?? [];
  const keyed = new Map();
  const plain = [];
  for (const each of before) each.key === undefined ? plain.push(each) : keyed.set(each.key, each);
  const kept = new Set();
  let place = 0;
  const after = wanted.map((kid) => {
    const node = typeof kid === "object" ? kid : { tag: "#text", text: String(kid) };
    const old = node.key === undefined ? plain[place++] : keyed.get(node.key);
    if (old?.tag === node.tag && !kept.has(old)) {
      kept.add(old);
      update(node, old);
    } else {
      create(node, parent);
    }
    return node;
  });
  for (const each of before) if (!kept.has(each)) each.dom.remove();
  let next = parent.firstChild;
  for (const { dom } of after) {
    if (dom === next) next = next.nextSibling;
    else parent.insertBefore(dom, next);
  }
  kidsOf.set(parent, after);
}

function create(node, parent) {
  if (node.tag === "#text") {
    node.dom = document.createTextNode(node.text);
    return;
  }
  const svg = node.tag === "svg" || parent.namespaceURI === SVG;
  node.dom = svg ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
  for (const name in node.attributes) set(node.dom, name, node.attributes[name]);
  replace(node.dom, node.kids);
}

function update(node, old) {
  node.dom = old.dom;
  if (node === old) return;
  if (node.tag === "#text") {
    if (node.text !== old.text) node.dom.data = node.text;
    return;
  }
  for (const name in old.attributes) if (!(name in node.attributes)) node.dom.removeAttribute(name);
  for (const name in node.attributes) {
    if (node.attributes[name] !== old.attributes[name]) set(node.dom, name, node.attributes[name]);
  }
  if (node.kids.length || old.kids.length) replace(node.dom, node.kids);
}

function set(dom, name, value) {
  if (value === null || value === undefined || value === false) dom.removeAttribute(name);
  else dom.setAttribute(name, value === true ? "" : value);
}

// -- how much of a string fits

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

export function width(text, font) {
  const key = font + text;
  let found = widths.get(key);
  if (found === undefined) {
    if (widths.size > 5000) widths.clear();
    pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
    found = pen.measureText(text).width;
    widths.set(key, found);
  }
  return found;
}

// A string that is at most this wide. A sentence loses its last words, a name its middle: often only
// the ends of names differ.
export function fit(text, room, font, { name = false } = {}) {
  const fits = (some) => width(some, font) <= room;
  if (fits(text)) return text;
  if (!name) {
    const words = text.split(" ");
    while (words.length > 1) {
      words.pop();
      const some = `${words.join(" ").replace(/[,;:]$/, "")}…`;
      if (fits(some)) return some;
    }
  }
  const cut = (n) => (name ? `${text.slice(0, Math.ceil(n / 2))}…${n > 1 ? text.slice(-Math.floor(n / 2)) : ""}` : `${text.slice(0, n)}…`);
  let most = Math.floor((text.length * room) / width(text, font));
  while (most > 0 && !fits(cut(most))) most -= 1;
  return most > 0 ? cut(most) : "";
}
