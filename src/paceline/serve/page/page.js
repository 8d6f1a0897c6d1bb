// Watches a server draft. All text is set as text, never as markup.
const at = (id) => document.getElementById(id);
const make = (tag, values = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), values);
  made.append(...children);
  return made;
};

const PHASES = ["draft", "verify", "sample", "other"];
const sources = ["target"]; // in order of appearance; the target's tokens have no colour
let trace = null; // what was asked and what came, by lane: [{name, events: [{ms, choice}]}]
let rounds = []; // of the first lane
let chosen = -1;
let running = null; // an AbortController

// -- colours ---------------------------------------------------------------------------------------------------------
function colour(source) {
  if (!sources.includes(source)) {
    sources.push(source);
    legend();
  }
  const index = sources.indexOf(source);
  return index ? `s${(index - 1) % 5}` : "";
}

function legend() {
  at("legend").replaceChildren(
    ...sources.map((source, index) =>
      make("li", {}, make("span", { className: index ? `s${(index - 1) % 5}` : "", textContent: ` ${source} ` }))),
  );
}

// -- lanes -----------------------------------------------------------------------------------------------------------
function addLane(name, leads) {
  const speed = make("span", { className: "speed" });
  const text = make("p", { ariaLive: "off" });
  const lane = make("div", { className: "lane" }, make("h3", {}, name, speed), text);
  at("lanes").append(lane);
  let tokens = 0;
  let start = null;
  let first = 0; // tokens that came before the clock starts
  return ({ ms, choice }) => {
    const told = choice.paceline;
    if (!told) return;
    if (start === null) [start, first] = [ms, told.tokens.length]; // the prompt's time is not the method's
    for (const round of told.rounds) if (leads) addRound(round);
    const refused = told.rounds.flatMap(refusedOf);
    for (const piece of told.pieces) {
      const span = make("span", { className: `token ${colour(piece.source)}`, textContent: piece.text });
      span.title = `${piece.source}${refused.length ? `; refused: ${refused.join(" ")}` : ""}`;
      text.append(span);
    }
    tokens += told.tokens.length;
    const seconds = (ms - start) / 1000;
    speed.textContent = seconds > 0 ? `${tokens} tokens · ${((tokens - first) / seconds).toFixed(1)} tokens/s` : "";
  };
}

const refusedOf = (round) =>
  round.tree.filter((_, index) => index && !round.path.includes(index)).map((node) => JSON.stringify(node.text));

// -- rounds ----------------------------------------------------------------------------------------------------------
function addRound(round) {
  const index = rounds.push(round) - 1;
  const inner = make("b");
  inner.style.height = `${(100 * round.accepted) / Math.max(round.drafted, 1)}%`;
  const box = make("i", {}, inner);
  box.style.height = `${Math.min(96, 3 + 6 * round.drafted)}%`;
  const bar = make("div", { className: "bar", id: `round-${index}`, onclick: () => choose(index) }, box);
  bar.setAttribute("role", "option");
  bar.setAttribute("aria-label", `round ${index + 1}: drafted ${round.drafted}, accepted ${round.accepted}`);
  bar.setAttribute("aria-selected", "false");
  at("timeline").append(bar);
  if (chosen === index - 1) choose(index); // follow, unless another was chosen
}

function choose(index) {
  if (index < 0 || index >= rounds.length) return;
  at(`round-${chosen}`)?.setAttribute("aria-selected", "false");
  chosen = index;
  const bar = at(`round-${index}`);
  bar.setAttribute("aria-selected", "true");
  at("timeline").setAttribute("aria-activedescendant", bar.id);
  if (document.activeElement === at("timeline")) bar.scrollIntoView({ block: "nearest", inline: "nearest" });
  const round = rounds[index];
  const total = PHASES.reduce((sum, phase) => sum + round.seconds[phase], 0);
  const parts = PHASES.map((phase) => `${phase} ${(1000 * round.seconds[phase]).toFixed(1)}`).join(", ");
  at("round").textContent =
    `Round ${index + 1} of ${rounds.length}: drafted ${round.drafted}, accepted ${round.accepted}, ` +
    `${(1000 * total).toFixed(1)} ms (${parts})`;
  at("phases").replaceChildren(...PHASES.map((phase) => {
    const part = make("i");
    part.style.width = `${(100 * round.seconds[phase]) / (total || 1)}%`;
    return part;
  }));
  drawTree(round);
}

function drawTree(round) {
  const depth = [];
  at("tree").replaceChildren(...round.tree.map((node, index) => {
    depth[index] = index ? depth[node.parent] + 1 : 0;
    const accepted = round.path.includes(index);
    const text = make("span", {
      className: `${accepted ? "" : "refused"} ${index ? colour(node.source) : ""}`,
      textContent: JSON.stringify(node.text),
    });
    const mark = index === 0 ? "root " : accepted ? "✓ " : "✗ ";
    const note = index === 0 ? "" : accepted ? " accepted" : " refused";
    return make("li", {}, "  ".repeat(depth[index]) + mark, text,
      make("span", { className: "visually-hidden", textContent: note }));
  }));
}

at("timeline").addEventListener("keydown", (event) => {
  const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: rounds.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(to);
});

// -- asking ----------------------------------------------------------------------------------------------------------
const headers = () => {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

async function* events(body, signal) {
  const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function reset(names) {
  sources.length = 1;
  rounds = [];
  chosen = -1;
  for (const id of ["lanes", "timeline", "tree", "phases"]) at(id).replaceChildren();
  at("round").textContent = at("error").textContent = "";
  legend();
  return names.map((name, index) => addLane(name, index === 0));
}

/** Ends what runs, and begins what can be stopped by its signal. */
function begin() {
  running?.abort();
  running = new AbortController();
  return running;
}

async function generate() {
  const method = at("drafter").value;
  const body = {
    messages: [{ role: "user", content: at("prompt").value }],
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
    seed: 0,
    stream: true,
  };
  const lanes = [{ name: method, options: { drafter: method, trace: true } }];
  if (at("race").checked) lanes.push({ name: "plain decoding", options: { speculate: false, trace: true } });
  trace = { format: "paceline-trace-1", prompt: at("prompt").value, lanes: lanes.map(({ name }) => ({ name, events: [] })) };
  const show = reset(lanes.map(({ name }) => name));
  const [own, kept] = [begin(), trace];
  busy(true);
  try {
    // One after the other: side by side they would slow each other down.
    for (const [index, lane] of lanes.entries()) {
      const began = performance.now();
      for await (const chunk of events({ ...body, paceline: lane.options }, own.signal)) {
        if (own.signal.aborted) return;
        for (const choice of chunk.choices) {
          const event = { ms: performance.now() - began, choice };
          kept.lanes[index].events.push(event);
          show[index](event);
        }
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    if (running === own) busy(false);
  }
}

function busy(now) {
  at("go").disabled = now;
  at("stop").disabled = !now;
  at("save").disabled = now || !trace;
  document.body.dataset.state = now ? "running" : "done";
}

// -- traces ----------------------------------------------------------------------------------------------------------
function save() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
  make("a", { href: url, download: "paceline-trace.json" }).click();
  URL.revokeObjectURL(url);
}

async function replay(file) {
  const own = begin();
  try {
    const read = JSON.parse(await file.text());
    if (own.signal.aborted) return;
    if (read.format !== "paceline-trace-1" || !read.lanes) throw new Error("this file is no trace of paceline");
    trace = read;
    at("prompt").value = trace.prompt;
    const show = reset(trace.lanes.map(({ name }) => name));
    busy(true);
    for (const [index, lane] of trace.lanes.entries()) {
      let now = 0;
      for (const event of lane.events) {
        await new Promise((then) => setTimeout(then, event.ms - now));
        if (own.signal.aborted) return;
        now = event.ms;
        show[index](event);
      }
    }
  } catch (error) {
    if (!own.signal.aborted) at("error").textContent = error.message;
  } finally {
    if (running === own) busy(false);
  }
}

// -- the server ------------------------------------------------------------------------------------------------------
async function methods() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) return;
  const [model] = (await answer.json()).data;
  const kept = at("drafter").value;
  const names = model.drafters.toSorted((one, other) => (other === "auto") - (one === "auto")); // auto first
  at("drafter").replaceChildren(...names.map((name) => make("option", { textContent: name })));
  if (model.drafters.includes(kept)) at("drafter").value = kept;
}

async function watch() {
  const answer = await fetch("metrics", { headers: headers() }).catch(() => null);
  if (!answer?.ok) {
    at("load").textContent = answer?.status === 401 ? "this server asks for an API key" : "the server does not answer";
    return;
  }
  const text = await answer.text();
  const value = (name) => Number(text.match(new RegExp(`^vllm:${name}\\{[^}]*\\} (.*)$`, "m"))?.[1] ?? 0);
  const drafted = value("spec_decode_num_draft_tokens_total");
  const rate = drafted ? `, ${Math.round((100 * value("spec_decode_num_accepted_tokens_total")) / drafted)} % of drafts accepted` : "";
  const load = `${value("num_requests_running")} running, ${value("num_requests_waiting")} waiting, ` +
    `${value("generation_tokens_total")} tokens so far${rate}`;
  if (at("load").textContent !== load) at("load").textContent = load;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
at("stop").addEventListener("click", () => running?.abort());
at("save").addEventListener("click", save);
at("load-trace").addEventListener("change", ({ target }) => {
  if (target.files.length) replay(target.files[0]);
  target.value = "";
});
at("key").addEventListener("change", () => { methods(); watch(); });
legend();
methods();
watch();
setInterval(watch, 2000);
