// What all client libraries are asked to do: conversations that the embedded pair was trained on. Not a test file.
import { golden } from '../../api/support/server.mjs';

export const weather = golden.find((g) => g.kind === 'tool_call' && g.messages.length <= 2 && g.tools[0].function.name === 'get_weather');
export const city = /<parameter=city>\n(.*)\n/.exec(weather.text)[1];
export const weatherText = '{"temperature": 17, "sky": "sunny"}';
export const fact = { messages: [{ role: 'user', content: 'What is the capital of Morocco?' }], answer: 'The capital of Morocco is Rabat.' };
export const noThinking = { chat_template_kwargs: { enable_thinking: false } };
export const thinking = { chat_template_kwargs: { enable_thinking: weather.thinking } };
