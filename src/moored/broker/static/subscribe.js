// subscribe(url, { channels, token, lastEventId, onevent, onreset, onskipped, onerror }) → { close() }
// Reads server-sent events with fetch, which can send a token; reconnects, and resumes after its last event.
export function subscribe(url, { channels = [], token, lastEventId: last = "", onevent, onreset, onskipped, onerror } = {}) {
  let wait = 2000, failures = 0, closed = false, abort, timer;
  const handle = (block) => {
    const lines = block.split("\n").map((line) => line.split(/: (.*)/s));
    const { event, id = null, retry } = Object.fromEntries(lines);
    const data = lines.filter(([field]) => field === "data").map(([, value]) => value).join("\n");
    wait = Number(retry) || wait;
    last = id ?? last;
    if (event === "reset") onreset?.(JSON.parse(data).reason);
    else if (event === "skipped") onskipped?.(JSON.parse(data).count);
    else if (event && event !== "start" && event !== "expired") onevent?.({ channel: event, data, id });
  };
  const connect = async () => {
    let pause = 0, silence;
    const alive = () => { clearTimeout(silence); silence = setTimeout(() => abort.abort(), 45000); };
    abort = new AbortController();
    try {
      const address = new URL(url, globalThis.location?.href), headers = {}, credentials = token ? "same-origin" : "include";
      channels.forEach((name) => address.searchParams.append("channel", name));
      if (last) address.searchParams.set("last_event_id", last);
      if (token) headers.Authorization = "Bearer " + (typeof token === "function" ? await token() : token);
      alive();
      const answer = await fetch(address, { headers, credentials, signal: abort.signal, cache: "no-store" });
      pause = 1000 * answer.headers.get("Retry-After") || 0;
      if (!answer.ok) throw new Error(await answer.text());
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", part; !(part = await reader.read()).done; alive()) {
        const blocks = (rest + part.value).split("\n\n");
        rest = blocks.pop();
        failures = 0;
        blocks.forEach(handle);
      }
    } catch (error) { failures += 1; if (!closed) onerror?.(error); }
    clearTimeout(silence);
    const delay = Math.min(30000, wait * 2 ** Math.min(failures, 4)) * (0.5 + Math.random() / 2);
    if (!closed) timer = setTimeout(connect, Math.max(pause, delay));
  };
  connect();
  return { close() { closed = true; clearTimeout(timer); abort.abort(); } };
}
