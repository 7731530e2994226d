// A plugin for qemu that counts the instructions that a program executes: all, loads, stores, and products of bytes. When the program ends, the counts go to standard error.
//
// The few functions of qemu's plugin interface that it uses are declared here, since Debian's packages have no header for them.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t at);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*each)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, void (*each)(unsigned, void *), int flags, void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*at_end)(qemu_plugin_id_t, void *), void *data);

#ifndef PLUGIN_VERSION
#define PLUGIN_VERSION 1
#endif
__attribute__((visibility("default"))) int qemu_plugin_version = PLUGIN_VERSION;

enum { ALL, LOADS, STORES, PRODUCTS, KINDS };
static uint64_t counts[KINDS];

static void one(unsigned processor, void *kind) {
  counts[ALL]++;
  if (kind != (void *)ALL) counts[(size_t)kind]++;
}

static size_t kind_of(uint32_t code) {
  // sdot and udot, whole registers or by a lane; usdot and sudot; smmla, ummla and usmmla.
  static const struct { uint32_t mask, value; } products[] = {
      {0x9fe0fc00, 0x0e809400}, {0x9fc0f400, 0x0f80e000}, {0xbfe0fc00, 0x0e809c00}, {0xbf40f400, 0x0f00f000}, {0xdfe0fc00, 0x4e80a400}, {0xffe0fc00, 0x4e80ac00},
  };
  for (size_t i = 0; i < sizeof products / sizeof *products; i++)
    if ((code & products[i].mask) == products[i].value) return PRODUCTS;
  // Loads and stores have bit 27 and not bit 25. Bit 22 marks a load; where one register is moved, bit 23 does, too.
  if ((code & 0x0a000000) != 0x08000000) return ALL;
  int is_pair = (code & 0x3a000000) == 0x28000000, is_structure = (code & 0xbe000000) == 0x0c000000;
  int is_literal = (code & 0x3b000000) == 0x18000000, is_vector = (code & 0x04000000) != 0;
  if (is_literal) return LOADS;
  if (is_pair || is_structure || is_vector) return code & 0x00400000 ? LOADS : STORES;
  return code & 0x00c00000 ? LOADS : STORES;
}

static void block(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
    struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
    uint32_t code;
    memcpy(&code, qemu_plugin_insn_data(insn), sizeof code);
    qemu_plugin_register_vcpu_insn_exec_cb(insn, one, 0, (void *)kind_of(code));
  }
}

static void end(qemu_plugin_id_t id, void *data) {
  fprintf(stderr, "counted %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", counts[ALL], counts[LOADS], counts[STORES], counts[PRODUCTS]);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info, int argc, char **argv) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, block);
  qemu_plugin_register_atexit_cb(id, end, NULL);
  return 0;
}
