/* Preloaded into a process: one name resolves to whatever NAMES_FILE holds at that moment. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*resolver)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  resolver next = (resolver)dlsym(RTLD_NEXT, "getaddrinfo");
  char address[64] = "";
  const char *path = getenv("NAMES_FILE");
  if (node && path && strcmp(node, "replica.test") == 0) {
    FILE *file = fopen(path, "r");
    if (file) {
      if (fgets(address, sizeof address, file)) {
        address[strcspn(address, "\n")] = 0;
        node = address;
      }
      fclose(file);
    }
  }
  return next(node, service, hints, found);
}
