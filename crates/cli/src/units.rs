//! Numbers for people: decimal units, three or four digits.

/// Bytes in decimal units, as disks and file managers show them: `103.4 MB`.
pub fn bytes(n: u64) -> String {
    scaled(n, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// A count in decimal units: `51.6 M`.
pub fn count(n: u64) -> String {
    scaled(n, &["", "k", "M", "G", "T", "P"])
}

fn scaled(n: u64, names: &[&str]) -> String {
    let (mut x, mut unit) = (n as f64, 0);
    // 999.95 would be shown as 1000.0.
    while x >= if unit == 0 { 1000.0 } else { 999.95 } && unit + 1 < names.len() {
        x /= 1000.0;
        unit += 1;
    }
    let digits = if unit == 0 { 0 } else { 1 };
    format!("{x:.digits$} {}", names[unit]).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_decimal_units() {
        assert_eq!((bytes(0), bytes(999), bytes(1000)), ("0 B".into(), "999 B".into(), "1.0 kB".into()));
        assert_eq!((bytes(999_950), bytes(103_360_152)), ("1.0 MB".into(), "103.4 MB".into()));
        assert_eq!((count(12), count(51_600_000)), ("12".into(), "51.6 M".into()));
        assert_eq!(bytes(u64::MAX), "18446.7 PB");
    }
}
