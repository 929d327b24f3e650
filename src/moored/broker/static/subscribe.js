// subscribe(url, { channels, token, lastEventId, share, onevent, onreset, onskipped, onerror }) → { close() }
// Reads server-sent events with fetch, which can send a token; reconnects, and resumes after its last event.
//
// The tabs of a browser share a stream, because a browser opens six HTTP/1.1 connections to a host. The tab that holds a lock
// leads: it reads the stream, and posts each block with the id of the event before it. Another tab takes the block if it has this
// event as its last one, so whoever leads, no event is missed or taken twice. While no block fits, it reads a stream of its own.
// The browser gives the lock to another tab when a tab ends; a leader that does not answer (browsers freeze tabs) loses it.
//
// Milliseconds: a stream is silent for SILENCE and is read again; the leader is silent for ASK_AFTER, is asked, and has ANSWER_WITHIN;
// a block that fits follows one that does not within FIT_WITHIN.
const SILENCE = 45000, ASK_AFTER = 30000, ANSWER_WITHIN = 2000, FIT_WITHIN = 1000;

export function subscribe(url, { channels = [], token, lastEventId: last = "", share, onevent, onreset, onskipped, onerror } = {}) {
  const address = new URL(url, globalThis.location?.href);
  [...channels].sort().forEach((name) => address.searchParams.append("channel", name));
  let at = last, key, seat, channel, stream, timer, leading = false, closed = false;

  const take = ({ event, id, data }) => {
    last = id ?? last; // an idle stream has ids, too: where to resume
    if (event) at = id ?? at;
    if (event === "reset") onreset?.(JSON.parse(data).reason);
    else if (event === "skipped") onskipped?.(JSON.parse(data).count);
    else if (event && event !== "start" && event !== "expired") onevent?.({ channel: event, data, id });
  };
  const post = (message) => { if (leading) channel.postMessage(message); };
  const use = (other) => { stream?.close(); stream = other; };

  // A stream of this tab, which begins after `delay` milliseconds.
  const read = (delay = 0) => {
    let wait = 2000, failures = 0, ended = false, abort, silence, again = setTimeout(connect, delay);
    const alive = () => { clearTimeout(silence); silence = setTimeout(() => abort.abort(), SILENCE); };
    const handle = (text) => {
      const lines = text.split("\n").map((line) => line.split(/: (.*)/s));
      const { event, id, retry } = Object.fromEntries(lines);
      const data = lines.filter(([field]) => field === "data").map(([, value]) => value).join("\n");
      wait = Number(retry) || wait;
      post({ after: at, block: { event, id, data } });
      take({ event, id, data });
    };
    async function connect() {
      let pause = 0;
      abort = new AbortController();
      try {
        const secret = await (typeof token === "function" ? token() : token);
        await join(secret);
        if (ended) return;
        const headers = {}, credentials = secret ? "same-origin" : "include", from = new URL(address);
        if (secret) headers.Authorization = `Bearer ${secret}`;
        if (last) from.searchParams.set("last_event_id", last);
        alive();
        const answer = await fetch(from, { headers, credentials, signal: abort.signal, cache: "no-store" });
        pause = 1000 * answer.headers.get("Retry-After") || 0;
        if (!answer.ok) throw new Error(await answer.text());
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let rest = "", part; !(part = await reader.read()).done && !ended; alive()) {
          const blocks = (rest + part.value).split("\n\n");
          rest = blocks.pop();
          failures = 0;
          for (const text of blocks) if (!ended) handle(text);
        }
      } catch (error) {
        failures += 1;
        if (!ended) { post({ error: String(error?.message ?? error) }); onerror?.(error); }
      }
      clearTimeout(silence);
      const backoff = Math.min(30000, wait * 2 ** Math.min(failures, 4)) * (0.5 + Math.random() / 2);
      if (!ended) again = setTimeout(connect, Math.max(pause, backoff));
    }
    return { close() { ended = true; clearTimeout(again); clearTimeout(silence); abort?.abort(); } };
  };

  // A hash of what the tabs that share have in common: the address, the channels, and `share` or the token; undefined if this tab does not share.
  const identify = async (secret) => {
    if (share === false || !(share || secret) || !globalThis.navigator?.locks || !globalThis.BroadcastChannel) return undefined;
    const text = JSON.stringify([address.href, share, share ? null : secret]);
    return `moored ${new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)))}`;
  };
  const leave = () => { seat?.abort(); channel?.close(); clearTimeout(timer); leading = false; };
  const join = async (secret) => {
    const found = await identify(secret);
    if (found === key || closed) return;
    leave(); // a token function may return the token of another user
    use(found ? undefined : read());
    if ((key = found)) enter();
  };
  const enter = () => {
    const { signal } = (seat = new AbortController());
    const left = new Promise((resolve) => signal.addEventListener("abort", resolve));
    const announce = () => post({ after: at, block: { id: last || undefined } });
    const lead = () => {
      if (signal.aborted) return undefined;
      clearTimeout(timer);
      leading = true;
      stream ??= read();
      announce();
      return left; // the lock is held until then
    };
    const lost = (error) => {
      if (signal.aborted) return;
      leave();
      if (error.name !== "AbortError") return void (stream ??= read()); // this page may not use locks
      use(read(FIT_WITHIN)); // another tab has taken the lock; a stream that was frozen may be stuck
      enter();
    };
    const ask = () => {
      channel.postMessage({ ask: true });
      timer = setTimeout(() => navigator.locks.request(key, { steal: true }, lead).catch(lost), ANSWER_WITHIN);
    };
    channel = new BroadcastChannel(key);
    channel.onmessage = ({ data: { ask: asked, after, block, error } }) => {
      if (asked) setTimeout(announce); // which a frozen tab does not run, although messages may reach it
      if (asked || leading) return;
      clearTimeout(timer);
      timer = setTimeout(ask, ASK_AFTER * (1 + Math.random() / 4));
      if (error) onerror?.(new Error(error));
      else if (at === after || !at) { use(undefined); at = after; take(block); }
      else if (block.event && at === block.id) use(undefined);
      else stream ??= read(FIT_WITHIN);
    };
    navigator.locks.request(key, { signal }, lead).catch(lost);
    ask();
  };
  stream = read();
  return { close() { closed = true; leave(); use(undefined); } };
}
