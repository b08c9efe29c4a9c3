/* loads LIBRARY SYMBOL...: checks that a library loads with all its dependencies, and has these
 * symbols. Run by dist/check.sh. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **arguments) {
    if (count < 2) {
        fprintf(stderr, "loads: give LIBRARY SYMBOL...\n");
        return 2;
    }
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "loads: %s\n", dlerror());
        return 1;
    }
    for (int at = 2; at < count; at++) {
        if (dlsym(library, arguments[at]) == NULL) {
            fprintf(stderr, "loads: %s has no %s\n", arguments[1], arguments[at]);
            return 1;
        }
    }
    return 0;
}
