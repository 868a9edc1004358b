// Inner loops compiled for each number of columns up to 16, so that a row stays in registers.
#pragma once

// `body(K)` with the number of columns as a constant, 0 for more than 16. A macro: a lambda would not be cloned.
#define CROWDNAL_BY_COLS(cols, body) \
  switch (cols) {                    \
    case 1: return body(1);          \
    case 2: return body(2);          \
    case 3: return body(3);          \
    case 4: return body(4);          \
    case 5: return body(5);          \
    case 6: return body(6);          \
    case 7: return body(7);          \
    case 8: return body(8);          \
    case 9: return body(9);          \
    case 10: return body(10);        \
    case 11: return body(11);        \
    case 12: return body(12);        \
    case 13: return body(13);        \
    case 14: return body(14);        \
    case 15: return body(15);        \
    case 16: return body(16);        \
    default: return body(0);         \
  }
