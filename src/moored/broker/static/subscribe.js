// subscribe(url, { channels, token, lastEventId, onevent, onreset, onskipped, onerror }) → { close() }
// Reads server-sent events with fetch, so that it can send a token; reconnects after its last event.
export function subscribe(url, options = {}) {
  const { channels = [], token, onevent, onreset, onskipped, onerror } = options;
  let last = options.lastEventId || "", wait = 2000, failures = 0, timer = null, abort = null, closed = false;
  const handle = (block) => {
    let name = "message", id = null, data = [];
    for (const line of block.split("\n")) {
      const at = line.indexOf(":"), field = line.slice(0, at), value = line.slice(at + 1).replace(/^ /, "");
      if (field === "event") name = value;
      else if (field === "data") data.push(value);
      else if (field === "id") id = value;
      else if (field === "retry") wait = Number(value) || wait;
    }
    if (id !== null) last = id;
    if (!data.length) return;
    const text = data.join("\n");
    if (name === "reset") onreset && onreset(JSON.parse(text).reason);
    else if (name === "skipped") onskipped && onskipped(JSON.parse(text).count);
    else if (name !== "expired") onevent && onevent({ channel: name, data: text, id });
  };
  const connect = async () => {
    const address = new URL(url, globalThis.location && location.href), headers = { Accept: "text/event-stream" };
    for (const name of channels) address.searchParams.append("channel", name);
    if (last) address.searchParams.set("last_event_id", last);
    if (token) headers.Authorization = "Bearer " + (typeof token === "function" ? await token() : token);
    abort = new AbortController();
    let pause = 0;
    try {
      const answer = await fetch(address, { headers, signal: abort.signal, cache: "no-store", credentials: "include" });
      if (!answer.ok) {
        pause = 1000 * Number(answer.headers.get("Retry-After"));
        throw new Error((await answer.text()) || answer.statusText);
      }
      failures = 0;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        blocks.forEach(handle);
      }
    } catch (error) {
      failures += 1;
      if (!closed && onerror) onerror(error);
    }
    if (!closed) timer = setTimeout(connect, Math.max(pause, Math.min(30000, wait * 2 ** Math.min(failures, 4)) * (0.5 + Math.random() / 2)));
  };
  connect();
  return { close() { closed = true; clearTimeout(timer); if (abort) abort.abort(); } };
}
