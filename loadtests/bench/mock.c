// Mock vLLM replica: one thread, epoll, fast enough that a gateway in front of it is always the slower one.
//
//   mock PORT INTERVAL_MS EVENTS CACHE_BLOCKS
//
// Chat and text completions are answered at once with a fixed text or, with `"stream": true`, as EVENTS events of 250
// bytes, one every INTERVAL_MS. `/metrics` reports a KV cache of CACHE_BLOCKS blocks of 16 tokens. `/counts` says what
// arrived and what was answered, so that the harness can prove that a gateway forwarded everything unharmed.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire.h"

#define MODEL "mock-model"
#define EVENT_BYTES 250
#define MAX_HEAD_BYTES 65536
#define READ_BYTES 16384
#define JSON "application/json"
#define LAST_CHUNKS "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
#define LAST_EVENT_BYTES 14

struct conn {
    int fd;
    struct buffer in;
    struct buffer out;
    bool wants_write;
    bool streaming;
    bool queued;
    int events_left;
    int64_t due;
    struct conn *next;
    struct conn *previous;
};

static struct {
    long requests;
    long streams;
    long running;
    long other_requests;
    long events;
    uint64_t request_bytes;
    uint64_t request_sum;
    uint64_t response_bytes;
} counts;

static int epoll_fd;
static int64_t interval_ns;
static int events_per_stream;
static long cache_blocks;

// Streams in the order in which their next event is due. All have one interval, so appending keeps the order.
static struct conn *pace_head;
static struct conn *pace_tail;

// Closed connections may still be named by events of the current epoll batch; they are freed after it.
static struct conn *dead;

static char event_chunk[512];
static size_t event_chunk_length;
static char *event_stamp;

static void pace_append(struct conn *conn)
{
    conn->next = NULL;
    conn->previous = pace_tail;
    if (pace_tail)
        pace_tail->next = conn;
    else
        pace_head = conn;
    pace_tail = conn;
    conn->queued = true;
}

static void pace_remove(struct conn *conn)
{
    if (!conn->queued)
        return;
    if (conn->previous)
        conn->previous->next = conn->next;
    else
        pace_head = conn->next;
    if (conn->next)
        conn->next->previous = conn->previous;
    else
        pace_tail = conn->previous;
    conn->queued = false;
}

static void conn_close(struct conn *conn)
{
    if (conn->fd < 0)
        return;
    if (conn->streaming)
        counts.running--;
    pace_remove(conn);
    close(conn->fd);
    conn->fd = -1;
    conn->next = dead;
    dead = conn;
}

static void free_dead(void)
{
    while (dead) {
        struct conn *conn = dead;
        dead = conn->next;
        free(conn->in.data);
        free(conn->out.data);
        free(conn);
    }
}

static void conn_watch(struct conn *conn, bool wants_write)
{
    if (conn->wants_write == wants_write)
        return;
    conn->wants_write = wants_write;
    struct epoll_event interest = {.events = EPOLLIN | EPOLLRDHUP | (wants_write ? EPOLLOUT : 0), .data.ptr = conn};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, conn->fd, &interest);
}

// Sends, or keeps what the socket does not take. Closes the connection on error.
static void conn_send(struct conn *conn, const char *data, size_t length)
{
    if (conn->fd < 0)
        return;
    ssize_t sent = 0;
    if (buffer_length(&conn->out) == 0) {
        sent = send(conn->fd, data, length, MSG_NOSIGNAL);
        if (sent == (ssize_t)length)
            return;
        if (sent < 0 && errno != EAGAIN) {
            conn_close(conn);
            return;
        }
        if (sent < 0)
            sent = 0;
    }
    buffer_append(&conn->out, data + sent, length - sent);
    conn_watch(conn, true);
}

static void conn_flush(struct conn *conn)
{
    while (buffer_length(&conn->out) > 0) {
        ssize_t sent = send(conn->fd, conn->out.data + conn->out.start, buffer_length(&conn->out), MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN)
                conn_close(conn);
            return;
        }
        buffer_consume(&conn->out, sent);
    }
    conn_watch(conn, false);
}

// ---- answers ------------------------------------------------------------------------------------------------------

static size_t reply(struct conn *conn, const char *status, const char *type, const char *format, ...)
{
    char body[4096];
    char message[5120];
    va_list values;

    va_start(values, format);
    int length = vsnprintf(body, sizeof body, format, values);
    va_end(values);
    if (length >= (int)sizeof body)
        die("reply too long");
    int total = snprintf(message, sizeof message,
                         "HTTP/1.1 %s\r\ndate: Mon, 30 Nov 2026 08:43:23 GMT\r\nserver: uvicorn\r\n"
                         "content-length: %d\r\ncontent-type: %s\r\n\r\n%s",
                         status, length, type, body);
    conn_send(conn, message, total);
    return length;
}

static void prepare_event(void)
{
    const char *format = "data: {\"id\":\"" STAMP_MARK "%016x-0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                         "\"created\":1796028203,\"model\":\"" MODEL "\",\"choices\":[{\"index\":0,\"delta\":"
                         "{\"content\":\" %s\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    char text[EVENT_BYTES + 1] = "";
    int bare = snprintf(NULL, 0, format, 0, text);

    memset(text, 'x', EVENT_BYTES - bare);
    int head = snprintf(event_chunk, sizeof event_chunk, "%x\r\n", EVENT_BYTES);
    int event = snprintf(event_chunk + head, sizeof event_chunk - head, format, 0, text);
    memcpy(event_chunk + head + event, "\r\n", 2);
    event_chunk_length = head + event + 2;
    event_stamp = strstr(event_chunk, STAMP_MARK) + strlen(STAMP_MARK);
}

static void stamp_event(void)
{
    uint64_t time = now_ns();
    for (int digit = STAMP_DIGITS - 1; digit >= 0; digit--) {
        event_stamp[digit] = "0123456789abcdef"[time & 15];
        time >>= 4;
    }
}

static void serve_requests(struct conn *conn);

// Sends one event, and the end of the stream behind the last.
static void stream_step(struct conn *conn)
{
    pace_remove(conn);
    stamp_event();
    conn_send(conn, event_chunk, event_chunk_length);
    counts.events++;
    counts.response_bytes += EVENT_BYTES;
    if (--conn->events_left > 0 && conn->fd >= 0) {
        conn->due += interval_ns;
        pace_append(conn);
        return;
    }
    conn_send(conn, LAST_CHUNKS, strlen(LAST_CHUNKS));
    if (conn->fd < 0)
        return;
    counts.events++;
    counts.response_bytes += LAST_EVENT_BYTES;
    counts.running--;
    conn->streaming = false;
    serve_requests(conn);
}

static void start_stream(struct conn *conn)
{
    static const char head[] = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 08:43:23 GMT\r\nserver: uvicorn\r\n"
                               "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    conn_send(conn, head, sizeof head - 1);
    if (conn->fd < 0)
        return;
    counts.streams++;
    counts.running++;
    conn->streaming = true;
    conn->events_left = events_per_stream;
    conn->due = now_ns();
    stream_step(conn);
}

// Value of the last `"stream":` in this part of a body: 0, 1, or -1 when there is none.
static int stream_flag(const char *part, size_t length)
{
    static const char key[] = "\"stream\":";
    const char *end = part + length;
    const char *found = NULL;

    for (const char *at = part; (at = memmem(at, end - at, key, sizeof key - 1)); found = at)
        at += sizeof key - 1;
    if (!found)
        return -1;
    while (found < end && *found == ' ')
        found++;
    return end - found >= 4 && memcmp(found, "true", 4) == 0;
}

static bool wants_stream(const char *body, size_t length)
{
    // Bodies are made with the flag at their end; only a gateway that rewrites them puts it elsewhere.
    size_t tail = length < 1024 ? length : 1024;
    int flag = stream_flag(body + length - tail, tail);
    if (flag < 0)
        flag = stream_flag(body, length);
    return flag == 1;
}

static void answer_completion(struct conn *conn, const char *body, size_t length)
{
    counts.requests++;
    counts.request_bytes += length;
    counts.request_sum += body_sum(body, length);
    if (wants_stream(body, length)) {
        start_stream(conn);
        return;
    }
    counts.response_bytes += reply(
        conn, "200 OK", JSON,
        "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1796028203,"
        "\"model\":\"" MODEL "\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
        "\"Hello from the mock replica, this is a fixed answer.\",\"refusal\":null,\"tool_calls\":[]},"
        "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":%zu,"
        "\"total_tokens\":%zu,\"completion_tokens\":16,\"prompt_tokens_details\":null}}",
        length / 4 + 1, length / 4 + 17);
}

static void answer_models(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    reply(conn, "200 OK", JSON,
          "{\"object\":\"list\",\"data\":[{\"id\":\"" MODEL "\",\"object\":\"model\",\"created\":1796028203,"
          "\"owned_by\":\"vllm\",\"root\":\"" MODEL "\",\"parent\":null,\"max_model_len\":1000000}]}");
}

static void answer_metrics(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    const char *labels = "engine=\"0\",model_name=\"" MODEL "\"";
    reply(conn, "200 OK", "text/plain; version=0.0.4; charset=utf-8",
          "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{%s} %ld.0\n"
          "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{%s} 0.0\n"
          "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{%s} 0.1\n"
          "# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{%s} 100.0\n"
          "# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{%s} 50.0\n"
          "# TYPE vllm:cache_config_info gauge\n"
          "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"%ld\",engine=\"0\"} 1.0\n",
          labels, counts.running, labels, labels, labels, labels, cache_blocks);
}

static void answer_counts(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    reply(conn, "200 OK", JSON,
          "{\"requests\":%ld,\"streams\":%ld,\"running\":%ld,\"other_requests\":%ld,\"events\":%ld,"
          "\"request_bytes\":%lu,\"request_sum\":%lu,\"response_bytes\":%lu}",
          counts.requests, counts.streams, counts.running, counts.other_requests, counts.events, counts.request_bytes,
          counts.request_sum, counts.response_bytes);
}

static void answer_version(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    reply(conn, "200 OK", JSON, "{\"version\":\"0.18.0\"}");
}

// sglang-router asks an engine about itself at these paths when it registers it.
static void answer_engine(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    reply(conn, "200 OK", JSON,
          "{\"model_path\":\"" MODEL "\",\"model_id\":\"" MODEL "\",\"served_model_name\":\"" MODEL "\","
          "\"tokenizer_path\":\"" MODEL "\",\"is_generation\":true,\"dp_size\":1,\"tp_size\":1,"
          "\"max_total_num_tokens\":%ld}",
          cache_blocks * 16);
}

static void answer_ok(struct conn *conn, const char *body, size_t length)
{
    (void)body, (void)length;
    reply(conn, "200 OK", JSON, "{}");
}

static const struct route {
    const char *path;
    void (*answer)(struct conn *, const char *, size_t);
} routes[] = {
    {"/v1/chat/completions", answer_completion},
    {"/v1/completions", answer_completion},
    {"/v1/models", answer_models},
    {"/metrics", answer_metrics},
    {"/health", answer_ok},
    {"/version", answer_version},
    {"/get_model_info", answer_engine},
    {"/model_info", answer_engine},
    {"/get_server_info", answer_engine},
    {"/server_info", answer_engine},
    {"/counts", answer_counts},
};

static void answer(struct conn *conn, const char *path, size_t path_length, const char *body, size_t length)
{
    size_t bare = strcspn(path, "? ");
    if (bare < path_length)
        path_length = bare;
    for (size_t at = 0; at < sizeof routes / sizeof *routes; at++) {
        if (strlen(routes[at].path) == path_length && memcmp(routes[at].path, path, path_length) == 0) {
            counts.other_requests += routes[at].answer != answer_completion && routes[at].answer != answer_counts;
            routes[at].answer(conn, body, length);
            return;
        }
    }
    counts.other_requests++;
    reply(conn, "404 Not Found", JSON, "{\"detail\":\"Not Found\"}");
}

// ---- requests -----------------------------------------------------------------------------------------------------

// Value of a header in a head that ends at `end`, or NULL.
static const char *find_header(const char *head, const char *end, const char *name)
{
    size_t length = strlen(name);
    const char *line = head;

    while ((line = memchr(line, '\n', end - line)) && ++line < end) {
        if (strncasecmp(line, name, length) == 0 && line[length] == ':')
            return line + length + 1;
    }
    return NULL;
}

// Answers the first request in the buffer; false when it is not there wholly yet.
static bool take_request(struct conn *conn)
{
    char *head = conn->in.data + conn->in.start;
    size_t available = buffer_length(&conn->in);
    char *blank = available ? memmem(head, available, "\r\n\r\n", 4) : NULL;
    if (!blank) {
        if (available > MAX_HEAD_BYTES)
            conn_close(conn);
        return false;
    }
    char *path = memchr(head, ' ', blank - head);
    char *path_end = path ? memchr(path + 1, ' ', blank - path - 1) : NULL;
    if (!path_end || find_header(head, blank, "transfer-encoding")) {
        reply(conn, "411 Length Required", JSON, "{\"detail\":\"the mock takes bodies with content-length only\"}");
        conn_close(conn);
        return false;
    }
    const char *length_text = find_header(head, blank, "content-length");
    size_t length = length_text ? strtoul(length_text, NULL, 10) : 0;
    size_t head_length = blank + 4 - head;
    if (available < head_length + length) {
        buffer_reserve(&conn->in, head_length + length - available);
        return false;
    }
    answer(conn, path + 1, path_end - path - 1, head + head_length, length);
    buffer_consume(&conn->in, head_length + length);
    return true;
}

static void serve_requests(struct conn *conn)
{
    while (conn->fd >= 0 && !conn->streaming && take_request(conn)) {
    }
}

static void conn_read(struct conn *conn)
{
    for (;;) {
        if (conn->in.capacity == conn->in.end)
            buffer_reserve(&conn->in, READ_BYTES);
        size_t room = conn->in.capacity - conn->in.end;
        ssize_t received = recv(conn->fd, conn->in.data + conn->in.end, room, 0);
        if (received == 0 || (received < 0 && errno != EAGAIN)) {
            conn_close(conn);
            return;
        }
        if (received < 0)
            break;
        conn->in.end += received;
        if ((size_t)received < room)
            break;
    }
    serve_requests(conn);
}

// ---- loop ---------------------------------------------------------------------------------------------------------

static int open_listener(int port)
{
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons(port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("bind");
    if (listen(fd, 4096) < 0)
        die("listen");
    return fd;
}

static void accept_all(int listener)
{
    int one = 1;
    int fd;

    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *conn = calloc(1, sizeof *conn);
        struct epoll_event interest = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = conn};
        conn->fd = fd;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &interest);
    }
}

static void serve_ready(int listener, const struct epoll_event *ready)
{
    struct conn *conn = ready->data.ptr;
    if (!conn) {
        accept_all(listener);
        return;
    }
    if (conn->fd >= 0 && ready->events & EPOLLOUT)
        conn_flush(conn);
    if (conn->fd >= 0 && ready->events & ~EPOLLOUT)
        conn_read(conn);
}

// Whole milliseconds, rounded up: events of many streams leave in small bursts, as from an engine that steps its batch.
static int wait_ms(void)
{
    if (!pace_head)
        return -1;
    int64_t wait_ns = pace_head->due - now_ns();
    return wait_ns <= 0 ? 0 : (int)((wait_ns + 999999) / 1000000);
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: mock PORT INTERVAL_MS EVENTS CACHE_BLOCKS\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    interval_ns = atol(argv[2]) * 1000000;
    events_per_stream = atoi(argv[3]);
    cache_blocks = atol(argv[4]);
    prepare_event();

    int listener = open_listener(atoi(argv[1]));
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = NULL};
    struct epoll_event ready[512];
    epoll_fd = epoll_create1(0);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &interest);
    for (;;) {
        int count = epoll_wait(epoll_fd, ready, 512, wait_ms());
        for (int at = 0; at < count; at++)
            serve_ready(listener, &ready[at]);
        int64_t now = now_ns();
        while (pace_head && pace_head->due <= now)
            stream_step(pace_head);
        free_dead();
    }
}
