// Every way in which Express applications read a field: started by scripts/body-parsers.
const express = require('express');
const parser = require('body-parser');
const multer = require('multer');
const fields = (body, field) => {
  const [outer, inner] = field.split('.');
  if (body === undefined || body === null || typeof body !== 'object') return null;
  return [body[field] ?? null, inner ? body[outer]?.[inner] ?? null : null, Object.assign({}, body)[field] ?? null];
};
const ways = {
  'express.json + urlencoded': [parser.json(), parser.urlencoded({ extended: true })],
  'urlencoded with querystring': [parser.urlencoded({ extended: false })],
  'urlencoded, every type': [parser.urlencoded({ extended: true, type: () => true, charsetSentinel: true, interpretNumericEntities: true })],
  'json, every type': [parser.json({ type: () => true, strict: false })],
  'URLSearchParams of text': [parser.text({ type: () => true }), (request, _, next) => {
    request.body = typeof request.body === 'string' ? Object.fromEntries(new URLSearchParams(request.body)) : undefined;
    next();
  }],
  'JSON.parse of text': [parser.text({ type: () => true }), (request, _, next) => {
    request.body = typeof request.body === 'string' ? JSON.parse(request.body) : undefined;
    next();
  }],
  multer: [multer().any()],
};
const http = require('http');
const names = Object.keys(ways);
// each way has an application of its own, since a body can be read once
const app = express();
names.forEach((name, at) => {
  const one = express.Router();
  one.use(ways[name]);
  one.use((request, response) => response.json(fields(request.body, request.headers['x-field']) ?? null));
  one.use((error, request, response, next) => response.json(null));
  app.use(`/${at}`, one);
});
const inner = http.createServer(app).listen(0, '127.0.0.1');
const ask = (request, raw, field, at) => new Promise((resolve) => {
  const headers = [];
  const skipped = ['connection', 'transfer-encoding', 'content-length', 'expect'];
  for (let i = 0; i < request.rawHeaders.length; i += 2) {
    if (!skipped.includes(request.rawHeaders[i].toLowerCase())) headers.push(request.rawHeaders[i], request.rawHeaders[i + 1]);
  }
  headers.push('x-field', field, 'content-length', String(raw.length), 'connection', 'close');
  const path = `/${at}/${request.url.includes('?') ? request.url.slice(request.url.indexOf('?')) : ''}`;
  const sent = http.request({ port: inner.address().port, host: '127.0.0.1', method: request.method, path, headers }, (answer) => {
    const parts = [];
    answer.on('data', (part) => parts.push(part)).on('end', () => {
      try { resolve(JSON.parse(Buffer.concat(parts))); } catch { resolve(null); }
    });
  });
  sent.on('error', () => resolve(null));
  sent.end(raw);
});
http.createServer((request, response) => {
  const chunks = [];
  request.on('data', (chunk) => chunks.push(chunk));
  request.on('end', async () => {
    const raw = Buffer.concat(chunks);
    const field = new URL(request.url, 'http://a').pathname.split('/').pop();
    const read = await Promise.all(names.map((_, at) => ask(request, raw, field, at)));
    const seen = JSON.stringify(Object.fromEntries(names.map((name, at) => [name, read[at]])));
    response.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(seen), Connection: 'close' });
    response.end(seen);
  });
}).listen(Number(process.argv[2]), '127.0.0.1');
