// The panel of the demo: a button for each fault, and the recovery that the service has measured.
"use strict";

const seconds = (number) => `${number.toFixed(2)} s`;

// One press: pressed, noticed, healthy again, and what it cost.
function recoveryText(it) {
  if (it.failed) return it.failed;
  if (it.noticed_after === null) return "pressed, not noticed yet";
  if (it.healthy_after === null) return `noticed after ${seconds(it.noticed_after)}, recovering`;
  return `noticed after ${seconds(it.noticed_after)}, the load served again after ${seconds(it.healthy_after)}`;
}

// The buttons are made once and stay, so that they keep the focus; only the texts below them change.
function faultRow(panel, it) {
  let row = panel.querySelector(`[data-fault="${it.name}"]`);
  if (row) return row;
  row = make("li", "fault");
  row.dataset.fault = it.name;
  const button = make("button", "break", it.title);
  const about = make("p", "detail", it.text);
  about.id = `about-${it.name}`;
  button.type = "button";
  button.setAttribute("aria-describedby", about.id);
  button.addEventListener("click", () => press(row, it.name));
  row.append(button, about, make("div", "recovery"));
  panel.append(row);
  return row;
}

async function press(row, name) {
  if (row.querySelector("button").getAttribute("aria-disabled") === "true") return;
  let problem = "";
  try {
    const answer = await fetch(`v1/break/${name}`, { method: "POST" });
    if (!answer.ok) problem = (await answer.json()).detail;
  } catch {
    problem = "the service does not respond";
  }
  if (problem) row.querySelector(".recovery").replaceChildren(make("p", "detail failure", problem));
}

function recovery(it, longest) {
  const shown = [];
  const row = make("div", "row");
  const done = it.healthy_after !== null;
  const word = it.failed ? "failed" : done ? "healthy" : "recovering";
  row.append(make("span", `badge ${it.failed ? "failed" : done ? "active" : "waiting"}`, word));
  if (done) row.append(make("strong", "took", `load served again after ${seconds(it.healthy_after)}`));
  row.append(make("span", "time", clockTime(it.wall)));
  shown.push(row);
  if (done) {
    // Both times on the scale of the longest recovery that is shown.
    const bar = make("div", "spans");
    bar.setAttribute("aria-hidden", "true");
    for (const [kind, length] of [["unnoticed", it.noticed_after], ["recovering", it.healthy_after - it.noticed_after], ["", longest - it.healthy_after]]) {
      const span = make("span", kind);
      span.style.flexGrow = String(length);
      bar.append(span);
    }
    shown.push(bar);
  }
  if (it.noticed) shown.push(short(`noticed after ${seconds(it.noticed_after)}: ${it.noticed}`));
  if (it.failed) shown.push(make("p", "detail failure", it.failed));
  if (done) shown.push(make("p", "detail", `cost: ${costText(it.cost) || "nothing"}`));
  return shown;
}

function showFaults(it) {
  byId("faults-section").hidden = !it;
  if (!it) return;
  const panel = byId("faults");
  const longest = Math.max(...it.recoveries.map((each) => each.healthy_after || 0), 1e-9);
  for (const fault of it.faults) {
    const row = faultRow(panel, fault);
    const button = row.querySelector("button");
    // Not disabled, which would lose the focus: a press is ignored, and the service would refuse it.
    button.setAttribute("aria-disabled", String(it.running !== null));
    const last = it.recoveries.find((each) => each.fault === fault.name);
    const text = JSON.stringify([last, longest]);
    if (!last || row.dataset.shown === text) continue;
    row.dataset.shown = text;
    row.querySelector(".recovery").replaceChildren(...recovery(last, longest));
  }
  const [newest] = it.recoveries;
  const text = newest ? `${newest.title}: ${recoveryText(newest)}` : "";
  if (byId("faults-status").textContent !== text) byId("faults-status").textContent = text;
}
