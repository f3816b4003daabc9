// loadgen: small open- or closed-loop HTTP/1.1 keep-alive load generator (plain text only).
//
//   loadgen [-c conns] [-d seconds] [-r rate] [-H 'Name: value']... [-k 'Name:count'] host port path
//
// Without -r every connection sends its next request as soon as it has the answer (closed loop).
// With -r requests arrive as a Poisson process of that total rate, and the latency of a request
// counts from its arrival, also when it had to wait for a free connection: there is no
// coordinated omission. -k adds a header whose value is drawn uniformly from count keys per
// request (to exercise per-key limiter state). Prints one line of JSON, latencies in microseconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BUF 262144
struct conn { int fd; double start; size_t have; char *buf; };

static uint64_t rng = 88172645463325252ull;
static uint64_t rnd(void) { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; }
static double unit(void) { return ((rnd() >> 11) + 1) * (1.0 / 9007199254740993.0); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

// Log-linear histogram, 128 steps per octave, in units of 0.1 us.
static uint64_t hist[64 * 128], total;
static double most;
static void record(double s) {
  if (s > most) most = s;
  uint64_t v = s * 1e7;
  int e = v < 128 ? 0 : 63 - __builtin_clzll(v) - 6;
  hist[e * 128 + (v >> e)]++;
  total++;
}
static double pct(double p) {
  uint64_t want = total * p, seen = 0;
  for (int i = 0; i < 64 * 128; i++)
    if ((seen += hist[i]) > want) return (double)((uint64_t)(i & 127) << (i >> 7)) / 10;
  return 0;
}

static struct sockaddr_in dst;
static int ep;
static char req[8192];
static size_t req_len;
static char *key_at;
static uint64_t keys;
static uint64_t n_done, n_2xx, n_429, n_other, n_err;

static int dial(struct conn *c) {
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (c->fd < 0 || connect(c->fd, (void *)&dst, sizeof dst)) return -1;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
  c->have = 0;
  return 0;
}
static void fire(struct conn *c, double start) {
  if (keys) { char b[17]; snprintf(b, sizeof b, "%016llx", (unsigned long long)(rnd() % keys)); memcpy(key_at, b, 16); }
  c->start = start;
  if (send(c->fd, req, req_len, MSG_NOSIGNAL) != (ssize_t)req_len) n_err++;
}
// Length of the first complete answer in the buffer; 0: incomplete; -1: not understood.
static ssize_t answer(struct conn *c) {
  c->buf[c->have] = 0;
  char *end = strstr(c->buf, "\r\n\r\n");
  if (!end) return c->have >= BUF ? -1 : 0;
  size_t head = end + 4 - c->buf;
  char *cl = 0;
  int chunked = 0;
  for (char *l = c->buf; l < end; l = strstr(l, "\r\n") + 2) {
    if (!strncasecmp(l, "content-length:", 15)) cl = l + 15;
    if (!strncasecmp(l, "transfer-encoding:", 18)) chunked = 1;
  }
  if (cl) { size_t n = head + strtoul(cl, 0, 10); return n > BUF ? -1 : c->have >= n ? (ssize_t)n : 0; }
  if (chunked) { char *z = strstr(end, "\r\n0\r\n\r\n"); return z ? z + 7 - c->buf : 0; }
  return head;
}

int main(int argc, char **argv) {
  int conns = 64, o;
  double secs = 3, rate = 0;
  char heads[4096] = "";
  char *key = 0;
  while ((o = getopt(argc, argv, "c:d:r:H:k:")) > 0) switch (o) {
    case 'c': conns = atoi(optarg); break;
    case 'd': secs = atof(optarg); break;
    case 'r': rate = atof(optarg); break;
    case 'H': strncat(heads, optarg, 2000); strcat(heads, "\r\n"); break;
    case 'k': key = strdup(optarg); break;
    default: return 2;
  }
  if (argc - optind != 3) { fprintf(stderr, "usage: loadgen [-c n] [-d s] [-r rate] [-H h] [-k name:count] host port path\n"); return 2; }
  dst.sin_family = AF_INET;
  dst.sin_port = htons(atoi(argv[optind + 1]));
  inet_pton(AF_INET, argv[optind], &dst.sin_addr);
  if (key) { char *c = strrchr(key, ':'); *c = 0; keys = strtoull(c + 1, 0, 10); sprintf(heads + strlen(heads), "%s: 0000000000000000\r\n", key); }
  req_len = sprintf(req, "GET %s HTTP/1.1\r\nHost: %s:%s\r\nUser-Agent: loadgen\r\nAccept: */*\r\n%s\r\n", argv[optind + 2], argv[optind], argv[optind + 1], heads);
  if (keys) key_at = req + req_len - 4 - 16;
  prctl(PR_SET_TIMERSLACK, 1);
  rng ^= (uint64_t)time(0) << 20 ^ getpid();
  ep = epoll_create1(0);
  struct conn *cs = calloc(conns, sizeof *cs), **idle = calloc(conns, sizeof *idle);
  int n_idle = 0;
  for (int i = 0; i < conns; i++) {
    cs[i].buf = malloc(BUF + 1);
    if (dial(&cs[i])) { perror("connect"); return 1; }
    idle[n_idle++] = &cs[i];
  }
  double t0 = now(), end = t0 + secs, next = t0;
  size_t cap = 1 << 20, qh = 0, qt = 0;        // arrivals that wait for a connection
  double *queue = malloc(cap * sizeof *queue);
  if (!rate) while (n_idle) fire(idle[--n_idle], now());
  struct epoll_event ev[512];
  for (;;) {
    double t = now();
    if (t >= end) break;
    if (rate) {
      while (next <= t) { if (qt - qh < cap) queue[qt++ % cap] = next; else n_err++; next += -log(unit()) / rate; }
      while (qh < qt && n_idle) fire(idle[--n_idle], queue[qh++ % cap]);
    }
    double until = rate && next < end ? next : end;
    double w = until - now();
    if (w < 0) w = 0;
    struct timespec ts = {.tv_sec = w, .tv_nsec = (w - (long)w) * 1e9};
    int k = epoll_pwait2(ep, ev, 512, &ts, 0);
    double got = now();
    for (int i = 0; i < k; i++) {
      struct conn *c = ev[i].data.ptr;
      ssize_t r = recv(c->fd, c->buf + c->have, BUF - c->have, 0), len = -1;
      if (r < 0 && errno == EAGAIN) continue;
      if (r > 0) { c->have += r; len = answer(c); if (!len) continue; }
      int dead = 0;
      if (len < 0) { n_err++; dead = 1; }
      else {
        int code = atoi(c->buf + 9);
        if (code / 100 == 2) n_2xx++; else if (code == 429) n_429++; else n_other++;
        n_done++;
        record(got - c->start);
        char *p = strcasestr(c->buf, "\r\nconnection: close");
        dead = p && p < c->buf + len;
        c->have -= len;
        memmove(c->buf, c->buf + len, c->have);
      }
      if (dead) { close(c->fd); if (dial(c)) { n_err++; usleep(1000); if (dial(c)) { fprintf(stderr, "cannot reconnect\n"); return 1; } } }
      if (!rate) fire(c, now());
      else if (qh < qt) fire(c, queue[qh++ % cap]);
      else idle[n_idle++] = c;
    }
  }
  double el = now() - t0;
  printf("{\"n\": %llu, \"ok\": %llu, \"rejected\": %llu, \"other\": %llu, \"errors\": %llu, \"rps\": %.1f, \"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f, \"backlog\": %zu}\n",
         (unsigned long long)n_done, (unsigned long long)n_2xx, (unsigned long long)n_429, (unsigned long long)n_other, (unsigned long long)n_err,
         n_done / el, pct(.5), pct(.9), pct(.99), pct(.999), most * 1e6, qt - qh);
}
