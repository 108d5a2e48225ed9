// Load generator: one thread, epoll, HTTP/1.1 keep-alive, loopback only.
//
//   loadgen -p PORT -f BODIES [-c CONNECTIONS] [-t SECONDS] [-w WARM-UP SECONDS] [-n REQUESTS] [-r REQUESTS/SECOND]
//           [-R RAMP SECONDS] [-g PID]...
//
// Closed loop unless -r is given: every connection sends its next request when the last is answered; -R spreads their
// first requests over that time. BODIES is a file of records: the length as 8 digits, then the body. The mark NONCE in a
// body becomes a fresh number for each request.
//
// Figures are taken inside one window: from the end of the warm-up, for -t seconds or until -n requests are answered.
// The CPU time of the processes -g is read at both its ends. After it no request is started and those under way are
// awaited, so that the totals can be compared with what the mock replicas counted. Prints one JSON object.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire.h"

#define NONCE "NONCE00000000000"
#define NONCE_DIGITS 16
#define MAX_BODIES 4096
#define MAX_PIDS 64
#define MAX_FAILURES 100      // More than these and the gateway is broken: stop early.
#define DRAIN_SECONDS 15      // A paced stream under way needs some seconds to end.
#define READ_BYTES (256 << 10)
#define IDLE_WAIT_NS (50 * NANOSECONDS / 1000)

// ---- what is measured ---------------------------------------------------------------------------------------------

struct samples {
    float *values;
    size_t count;
    size_t capacity;
};

struct counters {
    int64_t done;
    int64_t events;
    int64_t response_bytes;
};

static struct samples latency_us;
static struct samples first_byte_us;
static struct samples event_delay_us;

static struct counters counters;
static struct counters at_open;
static struct counters at_close;
static int64_t sent;
static int64_t failed;
static uint64_t request_bytes;
static uint64_t request_sum;

static enum { WARMING, MEASURING, DRAINING } stage = WARMING;
static int64_t opened_at;
static int64_t closed_at;
static int64_t cpu_ticks_at_open;
static int64_t cpu_ticks_at_close;

static void samples_add(struct samples *samples, int64_t nanoseconds)
{
    if (stage != MEASURING)
        return;
    if (samples->count == samples->capacity) {
        samples->capacity = samples->capacity ? samples->capacity * 2 : 4096;
        samples->values = realloc(samples->values, samples->capacity * sizeof *samples->values);
        if (!samples->values)
            die("realloc");
    }
    samples->values[samples->count++] = nanoseconds / 1e3f;
}

// ---- options ------------------------------------------------------------------------------------------------------

struct body {
    char *data;
    size_t length;
    char *nonce;
};

static struct body bodies[MAX_BODIES];
static int body_count;

static int port;
static int connection_count = 1;
static int64_t max_requests = INT64_MAX;
static double window_seconds = 3600;
static double warm_up_seconds;
static double requests_per_second;
static double ramp_seconds;
static int pids[MAX_PIDS];
static int pid_count;

static void read_bodies(const char *file_name)
{
    FILE *file = fopen(file_name, "rb");
    char digits[9] = "";

    if (!file)
        die(file_name);
    while (body_count < MAX_BODIES && fread(digits, 1, 8, file) == 8) {
        struct body *body = &bodies[body_count++];
        body->length = atol(digits);
        body->data = malloc(body->length);
        if (!body->data || fread(body->data, 1, body->length, file) != body->length)
            die("bodies");
        body->nonce = memmem(body->data, body->length, NONCE, NONCE_DIGITS);
    }
    fclose(file);
    if (body_count == 0) {
        fprintf(stderr, "loadgen: no bodies in %s\n", file_name);
        exit(2);
    }
}

static void read_options(int argc, char **argv)
{
    int option;

    while ((option = getopt(argc, argv, "p:f:c:t:w:n:r:R:g:")) > 0) {
        switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'f': read_bodies(optarg); break;
        case 'c': connection_count = atoi(optarg); break;
        case 't': window_seconds = atof(optarg); break;
        case 'w': warm_up_seconds = atof(optarg); break;
        case 'n': max_requests = atoll(optarg); break;
        case 'r': requests_per_second = atof(optarg); break;
        case 'R': ramp_seconds = atof(optarg); break;
        case 'g':
            if (pid_count < MAX_PIDS)
                pids[pid_count++] = atoi(optarg);
            break;
        default: exit(2);
        }
    }
    if (port == 0 || body_count == 0) {
        fprintf(stderr, "loadgen: -p PORT and -f BODIES are needed\n");
        exit(2);
    }
}

// ---- connections --------------------------------------------------------------------------------------------------

enum part { HEAD, BODY_COUNTED, BODY_UNTIL_CLOSE, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

struct conn {
    int fd;
    bool busy;
    bool wants_write;
    struct buffer out;
    int64_t sent_at;
    // The answer under way.
    enum part part;
    struct buffer head;
    size_t head_length;
    int status;
    bool closes;
    bool has_payload;
    bool after_newline;
    int64_t left; // bytes of the counted body or of this chunk still to come
    char line[64];
    size_t line_length;
};

static struct conn *conns;
static int epoll_fd;
static int64_t nonce;

static void conn_watch(struct conn *conn, bool wants_write)
{
    if (conn->wants_write == wants_write)
        return;
    conn->wants_write = wants_write;
    struct epoll_event interest = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = conn};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, conn->fd, &interest);
}

static void conn_open(struct conn *conn)
{
    int one = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons(port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = conn};

    conn->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(conn->fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect");
    fcntl(conn->fd, F_SETFL, O_NONBLOCK);
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn->wants_write = false;
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, conn->fd, &interest);
}

static void conn_close(struct conn *conn)
{
    close(conn->fd);
    conn->fd = -1;
}

static void conn_flush(struct conn *conn)
{
    while (buffer_length(&conn->out) > 0) {
        ssize_t count = send(conn->fd, conn->out.data + conn->out.start, buffer_length(&conn->out), MSG_NOSIGNAL);
        if (count < 0) {
            // A broken connection shows up as a read event; only wait here.
            conn_watch(conn, errno == EAGAIN);
            return;
        }
        buffer_consume(&conn->out, count);
    }
    conn_watch(conn, false);
}

static bool may_start(void)
{
    return stage != DRAINING && sent < max_requests;
}

static void start_request(struct conn *conn, int64_t due_at)
{
    const struct body *body = &bodies[sent % body_count];
    char head[512];
    char digits[NONCE_DIGITS + 1];

    if (conn->fd < 0)
        conn_open(conn);
    int head_length = snprintf(head, sizeof head,
                               "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                               "Content-Type: application/json\r\nAccept: */*\r\nAuthorization: Bearer sk-1234\r\n"
                               "User-Agent: loadgen\r\nContent-Length: %zu\r\n\r\n",
                               port, body->length);
    conn->out.start = conn->out.end = 0;
    buffer_append(&conn->out, head, head_length);
    buffer_append(&conn->out, body->data, body->length);
    char *body_out = conn->out.data + head_length;
    if (body->nonce) {
        snprintf(digits, sizeof digits, "%0*lld", NONCE_DIGITS, (long long)nonce++);
        memcpy(body_out + (body->nonce - body->data), digits, NONCE_DIGITS);
    }
    sent++;
    request_bytes += body->length;
    request_sum += body_sum(body_out, body->length);

    conn->busy = true;
    conn->part = HEAD;
    conn->head.start = conn->head.end = 0;
    conn->status = 0;
    conn->has_payload = conn->after_newline = conn->closes = false;
    conn->line_length = 0;
    conn->sent_at = due_at ? due_at : now_ns();
    conn_flush(conn);
}

static void end_request(struct conn *conn, bool complete, int64_t now)
{
    conn->busy = false;
    if (complete && conn->status == 200) {
        counters.done++;
        samples_add(&latency_us, now - conn->sent_at);
    } else if (failed++ == 0) {
        const char *body = conn->part == HEAD ? "" : conn->head.data + conn->head_length;
        const char *how = complete ? "complete" : "cut off";
        fprintf(stderr, "loadgen: first failure: %s, status %d: %s\n", how, conn->status, body);
    }
    if (conn->closes || !complete)
        conn_close(conn);
}

// ---- answers ------------------------------------------------------------------------------------------------------

// Delay of each event in this piece. An event whose stamp is split between two pieces is left out.
static void take_stamps(const char *data, const char *end, int64_t now)
{
    char digits[STAMP_DIGITS + 1] = "";

    while ((data = memmem(data, end - data, STAMP_MARK, strlen(STAMP_MARK)))) {
        data += strlen(STAMP_MARK);
        if (end - data < STAMP_DIGITS)
            return;
        memcpy(digits, data, STAMP_DIGITS);
        samples_add(&event_delay_us, now - strtoll(digits, NULL, 16));
    }
}

// Events end with an empty line, which may be split between two pieces.
static void take_events(struct conn *conn, const char *data, size_t length, int64_t now)
{
    const char *end = data + length;
    const char *at = data;

    if (conn->after_newline && *data == '\n') {
        counters.events++;
        at++;
    }
    while ((at = memmem(at, end - at, "\n\n", 2))) {
        counters.events++;
        at += 2;
    }
    conn->after_newline = end[-1] == '\n' && !(length >= 2 && end[-2] == '\n');
    take_stamps(data, end, now);
}

static void take_payload(struct conn *conn, const char *data, size_t length, int64_t now)
{
    if (!conn->has_payload) {
        conn->has_payload = true;
        samples_add(&first_byte_us, now - conn->sent_at);
    }
    counters.response_bytes += length;
    // Plain answers have no event stamp to look for and no empty line to count.
    if (conn->part == CHUNK_DATA)
        take_events(conn, data, length, now);
}

// Looks at a complete head; false when it is not HTTP.
static bool take_head(struct conn *conn)
{
    char *line = conn->head.data;

    if (strncmp(line, "HTTP/1.1 ", 9) != 0)
        return false;
    conn->status = atoi(line + 9);
    conn->part = BODY_UNTIL_CLOSE;
    while ((line = strstr(line, "\r\n"))) {
        line += 2;
        if (strncasecmp(line, "content-length:", 15) == 0) {
            conn->left = atoll(line + 15);
            conn->part = BODY_COUNTED;
        } else if (strncasecmp(line, "transfer-encoding: chunked", 26) == 0) {
            conn->part = CHUNK_SIZE;
        } else if (strncasecmp(line, "connection: close", 17) == 0) {
            conn->closes = true;
        }
    }
    return true;
}

enum progress { MORE, COMPLETE, BROKEN };

// Each feed_* takes what it can from the `*length` bytes at `*data` and advances both.
static enum progress feed_head(struct conn *conn, const char **data, size_t *length)
{
    size_t before = buffer_length(&conn->head);
    buffer_append(&conn->head, *data, *length);
    char *blank = memmem(conn->head.data, conn->head.end, "\r\n\r\n", 4);
    if (!blank) {
        *length = 0;
        return conn->head.end > 65536 ? BROKEN : MORE;
    }
    *blank = '\0';
    conn->head_length = blank + 4 - conn->head.data;
    *data += conn->head_length - before;
    *length -= conn->head_length - before;
    buffer_append(&conn->head, "", 1); // what came behind the head is text too, if a failure is to be shown
    if (!take_head(conn))
        return BROKEN;
    return conn->part == BODY_COUNTED && conn->left == 0 ? COMPLETE : MORE;
}

static void feed_payload(struct conn *conn, const char **data, size_t *length, int64_t now)
{
    size_t taken = *length;
    if (conn->part != BODY_UNTIL_CLOSE && (int64_t)taken > conn->left)
        taken = conn->left;
    take_payload(conn, *data, taken, now);
    conn->left -= taken;
    *data += taken;
    *length -= taken;
}

// Collects a line of the chunked framing in `conn->line`; false until its end is there.
static bool feed_line(struct conn *conn, const char **data, size_t *length)
{
    while (*length > 0) {
        char byte = *(*data)++;
        --*length;
        if (byte == '\n') {
            conn->line[conn->line_length] = '\0';
            conn->line_length = 0;
            return true;
        }
        if (byte != '\r' && conn->line_length < sizeof conn->line - 1)
            conn->line[conn->line_length++] = byte;
    }
    return false;
}

static enum progress feed_framing(struct conn *conn, const char **data, size_t *length)
{
    if (!feed_line(conn, data, length))
        return MORE;
    switch (conn->part) {
    case CHUNK_SIZE:
        conn->left = strtoll(conn->line, NULL, 16);
        conn->part = conn->left > 0 ? CHUNK_DATA : TRAILER;
        return MORE;
    case CHUNK_END:
        conn->part = CHUNK_SIZE;
        return conn->line[0] == '\0' ? MORE : BROKEN;
    default:
        return conn->line[0] == '\0' ? COMPLETE : MORE;
    }
}

static enum progress feed(struct conn *conn, const char *data, size_t length, int64_t now)
{
    enum progress progress = MORE;

    while (length > 0 && progress == MORE) {
        switch (conn->part) {
        case HEAD:
            progress = feed_head(conn, &data, &length);
            break;
        case BODY_COUNTED:
        case BODY_UNTIL_CLOSE:
            feed_payload(conn, &data, &length, now);
            if (conn->part == BODY_COUNTED && conn->left == 0)
                progress = COMPLETE;
            break;
        case CHUNK_DATA:
            feed_payload(conn, &data, &length, now);
            if (conn->left == 0)
                conn->part = CHUNK_END;
            break;
        default:
            progress = feed_framing(conn, &data, &length);
        }
    }
    return progress == COMPLETE && length > 0 ? BROKEN : progress;
}

static void conn_read(struct conn *conn)
{
    static char data[READ_BYTES];
    ssize_t received = recv(conn->fd, data, sizeof data, 0);
    int64_t now = now_ns();

    if (received < 0 && errno == EAGAIN)
        return;
    if (!conn->busy) {
        conn_close(conn); // closed while idle; the next request opens it again
        return;
    }
    if (received <= 0) {
        conn->closes = true;
        end_request(conn, received == 0 && conn->part == BODY_UNTIL_CLOSE, now);
    } else {
        enum progress progress = feed(conn, data, received, now);
        if (progress != MORE)
            end_request(conn, progress == COMPLETE, now);
    }
    if (!conn->busy && requests_per_second <= 0 && may_start())
        start_request(conn, 0);
}

// ---- loop ---------------------------------------------------------------------------------------------------------

// User and system time of the processes -g together, all their threads included.
static int64_t cpu_ticks(void)
{
    int64_t total = 0;

    for (int at = 0; at < pid_count; at++) {
        char name[64];
        char line[1024];
        long user = 0;
        long system = 0;
        snprintf(name, sizeof name, "/proc/%d/stat", pids[at]);
        FILE *file = fopen(name, "r");
        if (!file || !fgets(line, sizeof line, file))
            die(name);
        fclose(file);
        // Fields are counted from the ")" behind the command's name, which may itself hold spaces.
        char *fields = strrchr(line, ')');
        if (!fields || sscanf(fields, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld", &user, &system) != 2)
            die(name);
        total += user + system;
    }
    return total;
}

static void move_window(int64_t now, int64_t open_at)
{
    if (stage == WARMING && now >= open_at) {
        stage = MEASURING;
        opened_at = now;
        at_open = counters;
        cpu_ticks_at_open = cpu_ticks();
    }
    bool over = now >= opened_at + (int64_t)(window_seconds * NANOSECONDS) || counters.done + failed >= max_requests;
    if ((stage == MEASURING && over) || (stage != DRAINING && failed > MAX_FAILURES)) {
        stage = DRAINING;
        closed_at = now;
        at_close = counters;
        cpu_ticks_at_close = cpu_ticks();
    }
}

// Closed loop: sends the first request of each connection when its turn in the ramp has come. Returns when to look again.
static int64_t start_ramped(int64_t now, int64_t began_at)
{
    static int started;
    int64_t step = ramp_seconds * NANOSECONDS / connection_count;

    while (started < connection_count && may_start() && now >= began_at + started * step)
        start_request(&conns[started++], 0);
    return started < connection_count ? began_at + started * step : now + IDLE_WAIT_NS;
}

static struct conn *idle_conn(void)
{
    static int at;

    for (int tried = 0; tried < connection_count; tried++) {
        at = (at + 1) % connection_count;
        if (!conns[at].busy)
            return &conns[at];
    }
    return NULL;
}

// Open loop: one request at every multiple of the period. Time spent waiting for a free connection counts as latency,
// because that wait is the gateway's doing; lateness of this program's own timer does not. Returns when to look again.
static int64_t start_paced(int64_t now, int64_t began_at)
{
    static int64_t turn;
    static bool starved;
    int64_t period = NANOSECONDS / requests_per_second;

    while (may_start() && began_at + turn * period <= now) {
        struct conn *conn = idle_conn();
        if (!conn) {
            starved = true;
            return now + IDLE_WAIT_NS;
        }
        start_request(conn, starved ? began_at + turn * period : 0);
        turn++;
    }
    starved = false;
    return began_at + turn * period;
}

static void wait_ready(int64_t until)
{
    struct epoll_event ready[512];
    int64_t wait = until - now_ns();
    if (wait < 0)
        wait = 0;
    struct timespec limit = {.tv_sec = wait / NANOSECONDS, .tv_nsec = wait % NANOSECONDS};
    int count = epoll_pwait2(epoll_fd, ready, 512, &limit, NULL);

    for (int at = 0; at < count; at++) {
        struct conn *conn = ready[at].data.ptr;
        if (conn->fd >= 0 && ready[at].events & EPOLLOUT)
            conn_flush(conn);
        if (conn->fd >= 0 && ready[at].events & ~EPOLLOUT)
            conn_read(conn);
    }
}

static void run(void)
{
    int64_t began_at = now_ns();
    int64_t open_at = began_at + (int64_t)(warm_up_seconds * NANOSECONDS);

    for (;;) {
        int64_t now = now_ns();
        move_window(now, open_at);
        if (stage == DRAINING && (counters.done + failed == sent || now > closed_at + DRAIN_SECONDS * NANOSECONDS))
            return;
        int64_t until = now + IDLE_WAIT_NS;
        if (stage != DRAINING)
            until = requests_per_second > 0 ? start_paced(now, began_at) : start_ramped(now, began_at);
        wait_ready(until);
    }
}

// ---- report -------------------------------------------------------------------------------------------------------

static int compare_floats(const void *left, const void *right)
{
    float difference = *(const float *)left - *(const float *)right;
    return (difference > 0) - (difference < 0);
}

static void print_samples(const char *name, struct samples *samples)
{
    size_t count = samples->count;
    float *values = samples->values;

    if (count == 0) {
        printf(",\"%s\":null", name);
        return;
    }
    qsort(values, count, sizeof *values, compare_floats);
    printf(",\"%s\":{\"count\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", name, count,
           values[count / 2], values[count * 9 / 10], values[count * 99 / 100], values[count - 1]);
}

int main(int argc, char **argv)
{
    struct timespec time;

    signal(SIGPIPE, SIG_IGN);
    read_options(argc, argv);
    // Microseconds since 1970: 16 digits, and no two runs share a nonce.
    clock_gettime(CLOCK_REALTIME, &time);
    nonce = time.tv_sec * 1000000LL + time.tv_nsec / 1000;
    epoll_fd = epoll_create1(0);
    conns = calloc(connection_count, sizeof *conns);
    if (!conns)
        die("calloc");
    for (int at = 0; at < connection_count; at++)
        conn_open(&conns[at]);
    run();

    printf("{\"seconds\":%.4f,\"cpu_seconds\":%.3f,\"done\":%lld,\"events\":%lld", (closed_at - opened_at) / 1e9,
           (double)(cpu_ticks_at_close - cpu_ticks_at_open) / sysconf(_SC_CLK_TCK),
           (long long)(at_close.done - at_open.done), (long long)(at_close.events - at_open.events));
    printf(",\"totals\":{\"sent\":%lld,\"done\":%lld,\"failed\":%lld,\"events\":%lld,\"request_bytes\":%llu,"
           "\"request_sum\":%llu,\"response_bytes\":%lld}",
           (long long)sent, (long long)counters.done, (long long)failed, (long long)counters.events,
           (unsigned long long)request_bytes, (unsigned long long)request_sum, (long long)counters.response_bytes);
    print_samples("latency_us", &latency_us);
    print_samples("first_byte_us", &first_byte_us);
    print_samples("event_delay_us", &event_delay_us);
    printf("}\n");
    return 0;
}
