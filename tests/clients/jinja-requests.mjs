// Variables for chat templates: hand-made requests that touch every branch of the known templates, and random ones.
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'Das Wetter für "eine Stadt" <b>&</b>',
    parameters: {
      type: 'object',
      properties: {
        location: { type: 'string', description: 'City' },
        unit: { type: 'string', enum: ['celsius', 'fahrenheit'] },
        days: { type: ['integer', 'null'], default: 3 },
        nested: { type: 'object', properties: { a: { type: 'array', items: { type: 'number' } } }, required: ['a'] },
      },
      required: ['location'],
    },
    return: { type: 'string', description: 'a forecast' },
  },
};
const bare = { name: 'search', description: '搜索', parameters: { type: 'object', properties: {} } };
const args = { location: 'Zürich', days: 3, exact: true, note: null, ratio: 1.5, one: 1.0, big: 12345678901234, list: [1, 'é', { k: 'v' }], map: { z: 1, a: [true, null] }, empty: '', lines: 'a\nb\n' };
const call = (name, a, wrapped = true) => (wrapped ? { id: 'call_1', type: 'function', function: { name, arguments: a } } : { name, arguments: a });

const conversations = [
  [{ role: 'user', content: 'Hi' }],
  [{ role: 'system', content: ' Be brief. ' }, { role: 'user', content: ' Hello\u3000\n' }],
  [{ role: 'system', content: '' }, { role: 'user', content: 'x' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'b' }, { role: 'user', content: 'c' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: '<think>\nwhy\n</think>\n\nb' }, { role: 'user', content: 'c' }, { role: 'assistant', content: '<think>\nw2\n</think>\n\nd' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'b', reasoning_content: 'because\n' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: '', reasoning_content: 'r', tool_calls: [call('get_weather', args), call('search', {}, true)] }, { role: 'tool', content: '{"t": 3}', tool_call_id: 'call_1' }, { role: 'tool', content: 'ok', name: 'search' }, { role: 'assistant', content: 'done' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'Let me look.', tool_calls: [call('search', { q: '<tool_response>' }, false)] }, { role: 'tool', content: 'r' }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: 'x', tool_calls: [call('search', { q: 1 })] }, { role: 'user', content: '<tool_response>\nr\n</tool_response>' }],
  [{ role: 'user', content: [{ type: 'text', text: 'Look: ' }, { type: 'image_url', image_url: { url: 'data:' } }, { type: 'image' }, { type: 'video', video: 'v' }, { type: 'text', text: 'and?' }] }],
  [{ role: 'system', content: [{ type: 'text', text: 'S1' }, { type: 'text', text: 'S2' }] }, { role: 'user', content: [{ type: 'text', text: 'U' }] }],
  [{ role: 'system', content: [{ type: 'image' }] }, { role: 'user', content: 'u' }],
  [{ role: 'user', content: '⚠️ 你好 \u00a0é𝄞 {{ not a template }} {% raw %}' }],
  [{ role: 'user', content: 'a' }, { role: 'system', content: 'late' }],
  [{ role: 'developer', content: 'd' }, { role: 'user', content: 'a' }],
  [{ role: 'strange', content: 'd' }, { role: 'user', content: 'a' }],
  [{ role: 'assistant', content: 'first' }],
  [{ role: 'tool', content: 'lonely' }],
  [],
  [{ role: 'user', content: null }],
  [{ role: 'user' }],
  [{ role: 'user', content: 5 }],
  [{ role: 'user', content: [{ type: 'audio' }] }],
  [{ role: 'user', content: 'a' }, { role: 'assistant', content: null, tool_calls: [call('get_weather', '{"location": "x"}')] }],
  [{ role: 'user', content: 'a <|think_off|>' }, { role: 'assistant', content: 'b' }, { role: 'user', content: 'c' }],
  [{ role: 'user', content: 'q' }, { role: 'assistant', content: '', tool_calls: [call('search', { a: 'x' })] }, { role: 'tool', content: 'error: failed to open' }, { role: 'assistant', content: '', tool_calls: [call('search', { a: 'y' })] }, { role: 'tool', content: 'Traceback: no' }, { role: 'assistant', content: 'sorry' }, { role: 'user', content: 'ok' }],
  [{ role: 'user', content: 'q' }, { role: 'assistant', content: 'c</think>d', reasoning_content: null }],
  [{ role: 'user', content: 'q' }, { role: 'assistant', content: 'x', thinking: 'old field' }, { role: 'user', content: 'r' }],
  [{ role: 'user', content: 'q/nothink' }, { role: 'observation', content: 'o' }],
];

const settings = [
  { add_generation_prompt: true },
  { add_generation_prompt: false },
  { add_generation_prompt: true, enable_thinking: false },
  { add_generation_prompt: true, enable_thinking: true, preserve_thinking: true },
  { add_generation_prompt: true, preserve_thinking: false, reasoning_effort: 'high' },
  { add_generation_prompt: true, reasoning_effort: 'low', add_vision_id: true, bos_token: '<s>', eos_token: '</s>' },
  { tools: [weather, bare], add_generation_prompt: true },
  { tools: [weather], add_generation_prompt: true, enable_thinking: false, tool_call_format: 'json', max_tool_arg_chars: 3, max_tool_response_chars: 4 },
  { tools: [], documents: null, clear_thinking: false, add_generation_prompt: true, reasoning_effort: 'medium' },
  { tools: null, builtin_tools: ['code_interpreter', 'brave_search'], date_string: '1 Jan 2025', tools_in_user_message: false, auto_disable_thinking_with_tools: true },
  { custom_tools: [bare], tools_in_user_message: false },
];

export function requests() {
  return conversations.flatMap((messages) => settings.map((s) => ({ messages, ...s })));
}

const texts = ['', ' ', 'Hello', '  spaced  ', 'line\nline', '\n\nx\n\n', 'é ü 漢字', '<think>a</think>b', '</think>', '<tool_call>', '<tool_response>x</tool_response>', '"quoted" \\ /', '\u2028 \u0085', "it's", '𝄞', '<|im_end|>', '0', 'error: no'];

function value(r, depth = 0) {
  switch (r.below(depth > 2 ? 6 : 8)) {
    case 0: return r.pick(texts);
    case 1: return r.below(1000) - 500;
    case 2: return r.pick([0.1, 1.5, -2.25, 1e21, 1e-7, 3.0e5, 0.30000000000000004]);
    case 3: return r.chance(0.5);
    case 4: return null;
    case 5: return r.pick(texts);
    case 6: return Array.from({ length: r.below(4) }, () => value(r, depth + 1));
    default: return object(r, depth + 1);
  }
}
function object(r, depth = 0) {
  return Object.fromEntries(Array.from({ length: r.below(4) }, () => [r.pick(['a', 'b', 'key', 'items', 'ключ', 'x y', 'type']), value(r, depth)]));
}
function content(r) {
  if (r.chance(0.7)) return r.pick(texts) + r.pick(texts);
  if (r.chance(0.1)) return null;
  return Array.from({ length: r.below(4) }, () => r.pick([{ type: 'text', text: r.pick(texts) }, { type: 'image', image: 'i' }, { type: 'video' }, { type: 'text', text: r.pick(texts) }]));
}

export function randomRequest(r) {
  const messages = [];
  if (r.chance(0.4)) messages.push({ role: 'system', content: content(r) });
  for (let turns = 1 + r.below(3); turns > 0; --turns) {
    messages.push({ role: 'user', content: content(r) });
    if (turns === 1 && r.chance(0.4)) break;
    for (let steps = r.below(3); steps > 0; --steps) {
      const calls = Array.from({ length: 1 + r.below(2) }, () => call(r.pick(['f', 'get_weather']), object(r), r.chance(0.8)));
      messages.push({ role: 'assistant', content: content(r), tool_calls: calls, ...(r.chance(0.5) ? { reasoning_content: r.pick(texts) } : {}) });
      for (let k = calls.length; k > 0; --k) messages.push({ role: 'tool', content: content(r) });
    }
    if (r.chance(0.8)) messages.push({ role: 'assistant', content: content(r), ...(r.chance(0.4) ? { reasoning_content: r.pick([...texts, null]) } : {}) });
  }
  if (r.chance(0.05)) messages.push({ role: r.pick(['system', 'developer', 'other']), content: 'late' });
  const out = { messages, add_generation_prompt: r.chance(0.8) };
  if (r.chance(0.4)) out.tools = Array.from({ length: r.below(3) }, () => r.pick([weather, bare, { type: 'function', function: { name: 'f', parameters: object(r) } }]));
  if (r.chance(0.4)) out.enable_thinking = r.pick([true, false, false, null]);
  if (r.chance(0.3)) out.preserve_thinking = r.pick([true, false, null]);
  if (r.chance(0.2)) out.add_vision_id = r.chance(0.5);
  if (r.chance(0.2)) out.reasoning_effort = r.pick(['low', 'medium', 'high', 'none']);
  return out;
}
