// Models that think first write their thoughts in front of the answer. Servers that know the model's format send them apart (`reasoning_content`); others
// leave them in the text, as <think>thoughts</think>answer.

const OPEN = "<think>";
const CLOSE = "</think>";

// Of what was received so far: {thought, text}, and whether the thought may still go on. Nothing that might yet become a tag is shown.
export function split(content, reasoning = "") {
  const body = content.trimStart();
  const close = body.indexOf(CLOSE);
  if (body.startsWith(OPEN)) {
    const thought = body.slice(OPEN.length, close < 0 ? undefined : close);
    return { thought: joined(reasoning, thought.trim()), text: close < 0 ? "" : body.slice(close + CLOSE.length).trimStart(), open: close < 0 };
  }
  if (OPEN.startsWith(body)) return { thought: reasoning, text: "", open: true };
  // Some templates have written the opening tag themselves.
  if (close >= 0 && !body.includes(OPEN)) {
    return { thought: joined(reasoning, body.slice(0, close).trim()), text: body.slice(close + CLOSE.length).trimStart(), open: false };
  }
  return { thought: reasoning, text: content, open: false };
}

const joined = (a, b) => (a && b ? `${a}\n\n${b}` : a || b);
