//! Tables of which a token uses few rows stay on disk on a GPU, too, and change no logit.

use sluice_engine::TablePlacement;

use super::*;

/// Models with such tables, and the rows that a token uses of them.
const WITH_TABLES: [(&str, u64); 2] = [("gemma4_per_layer", 1), ("qwen4_exp", 2 * 4)];

#[test]
fn tables_on_disk_change_no_logit() {
    let Some((device, _turn)) = device() else { return };
    for (name, rows) in WITH_TABLES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        for mode in [Activations::F32, Activations::Int8] {
            let mut cpu = on(None, &folder, options(mode, None, 64));
            let tokens = prompt(&cpu, 100, 9);
            let wanted = logits(&mut cpu, &tokens);
            for devices in device_lists(device) {
                // More rows than the cache has room for, and single ones.
                for (chunk, n) in [(100, 100), (1, 10)] {
                    let (tables, table_budget) = (TablePlacement::Disk, Some(1));
                    let options = Options { tables, table_budget, ..options(mode, None, chunk) };
                    let mut gpu = on_all(&devices, &folder, options);
                    let found = logits(&mut gpu, &tokens[..n]);
                    assert!(wanted.starts_with(&found), "{name}, {mode:?}, {devices:?}, {chunk} at once");
                    let stats = gpu.table_stats().expect("a table is on disk");
                    assert!(stats.wanted == rows * n as u64 && stats.read > 0, "{stats:?}");
                }
            }
        }
    }
}
