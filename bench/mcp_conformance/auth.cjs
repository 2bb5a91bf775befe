// Loaded before the suite, which is run unchanged: it puts on the token that clients of a door send, and calls tools and prompts
// of the declared server by the names that the door gives them (`mcp_suite_NAME`).
const token = 'Bearer ' + process.env.RINGFENCE_TOKEN;
const PREFIX = 'mcp_suite_';
const NAMED = ['tools/call', 'prompts/get'];
const undici = require(process.env.SUITE + '/node_modules/undici');

function there(body) {
  if (typeof body !== 'string') return body;
  return body.replace(/("method":\s*"(?:tools\/call|prompts\/get|completion\/complete)".*?"name":\s*")(test_|json_schema_)/s, `$1${PREFIX}$2`);
}

async function back(response) {
  const type = response.headers.get('content-type') || '';
  if (!/json|event-stream/.test(type) || !response.body) return response;
  const decoder = new TextDecoder();
  const encoder = new TextEncoder();
  const rename = new TransformStream({
    transform(chunk, controller) {
      controller.enqueue(encoder.encode(decoder.decode(chunk, { stream: true }).replaceAll(PREFIX, '')));
    },
  });
  return new Response(response.body.pipeThrough(rename), response);
}

const original = globalThis.fetch;
globalThis.fetch = async (url, options) => {
  const headers = new Headers(options?.headers ?? (url instanceof Request ? url.headers : undefined));
  headers.set('authorization', token);
  const name = headers.get('mcp-name');
  const calls = NAMED.includes(headers.get('mcp-method'));
  if (calls && name && /^(test_|json_schema_)/.test(name)) headers.set('mcp-name', PREFIX + name);
  return back(await original(url, { ...options, headers, body: there(options?.body) }));
};

const http = require('http');
const request = http.request;
http.request = (...given) => {
  const made = request(...given);
  made.setHeader('authorization', token);
  const name = made.getHeader('mcp-name');
  if (NAMED.includes(made.getHeader('mcp-method')) && /^test_/.test(name ?? '')) made.setHeader('mcp-name', PREFIX + name);
  const parts = [];
  const end = made.end.bind(made);
  made.write = (part) => parts.push(part);
  made.end = (part) => {
    if (part) parts.push(part);
    const body = there(parts.map(String).join(''));
    if (body) made.setHeader('content-length', Buffer.byteLength(body));
    return end(body);
  };
  return made;
};

undici.setGlobalDispatcher(
  undici.getGlobalDispatcher().compose((dispatch) => (options, handler) => {
    const given = options.headers ?? {};
    const pairs = typeof given[Symbol.iterator] === 'function' ? [...given] : Object.entries(given);
    const headers = Array.isArray(given) && !Array.isArray(given[0]) ? {} : Object.fromEntries(pairs);
    if (Array.isArray(given) && !Array.isArray(given[0])) {
      for (let at = 0; at < given.length; at += 2) headers[given[at]] = given[at + 1];
    }
    return dispatch({ ...options, headers: { ...headers, authorization: token } }, handler);
  }),
);
