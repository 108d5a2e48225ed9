// What the load generator and the mock replica share: a clock, growable buffers, and the sum that tells whether bodies
// arrived as they were sent.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NANOSECONDS 1000000000LL

// Every streamed event carries the time it was sent right behind this mark, as 16 hex digits of CLOCK_MONOTONIC
// nanoseconds, so that the receiver can tell its one-way delay.
#define STAMP_MARK "chatcmpl-"
#define STAMP_DIGITS 16

static inline int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * NANOSECONDS + time.tv_nsec;
}

static inline _Noreturn void die(const char *what)
{
    perror(what);
    exit(1);
}

// Bytes from `start` to `end` are waiting to be used.
struct buffer {
    char *data;
    size_t start;
    size_t end;
    size_t capacity;
};

static inline size_t buffer_length(const struct buffer *buffer)
{
    return buffer->end - buffer->start;
}

// Makes room for `length` more bytes behind `end`.
static inline void buffer_reserve(struct buffer *buffer, size_t length)
{
    if (buffer->start > 0) {
        memmove(buffer->data, buffer->data + buffer->start, buffer_length(buffer));
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->capacity - buffer->end >= length)
        return;
    buffer->capacity = (buffer->end + length) * 2;
    buffer->data = realloc(buffer->data, buffer->capacity);
    if (!buffer->data)
        die("realloc");
}

static inline void buffer_append(struct buffer *buffer, const char *data, size_t length)
{
    buffer_reserve(buffer, length);
    memcpy(buffer->data + buffer->end, data, length);
    buffer->end += length;
}

static inline void buffer_consume(struct buffer *buffer, size_t length)
{
    buffer->start += length;
    if (buffer->start == buffer->end)
        buffer->start = buffer->end = 0;
}

// 64-bit sum of a body that any changed, moved or missing byte changes. Four lanes: one multiplication waits for the one
// before it, and at 256 KB a body a single lane would cost more than the rest of the mock.
static inline uint64_t body_sum(const char *data, size_t length)
{
    const uint64_t prime = 0x9E3779B185EBCA87ULL;
    uint64_t lanes[4] = {1, 2, 3, 4};
    uint64_t words[4];
    uint64_t sum = length;
    size_t at = 0;

    for (; at + sizeof words <= length; at += sizeof words) {
        memcpy(words, data + at, sizeof words);
        for (int lane = 0; lane < 4; lane++)
            lanes[lane] = (lanes[lane] ^ words[lane]) * prime;
    }
    memset(words, 0, sizeof words);
    memcpy(words, data + at, length - at);
    for (int lane = 0; lane < 4; lane++) {
        lanes[lane] = (lanes[lane] ^ words[lane]) * prime;
        sum = (sum ^ (lanes[lane] >> 29) ^ lanes[lane]) * prime;
    }
    return sum;
}
