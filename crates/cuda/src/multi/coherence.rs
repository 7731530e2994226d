//! Coherence of a buffer that several devices have a copy of.
//!
//! Some devices have an equal copy, except for at most one region that is newer on one device. So the residual stream of a step passes from device to device and only its own
//! rows are copied. For any other access the copies are made equal first.

use sluice_backend::Tensor;

/// Devices by number, as bits.
pub type Devices = u64;

/// A copy from one device to another that has to come before an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub from: usize,
    pub to: usize,
    pub what: TransferPart,
}

/// The part of a buffer that a transfer copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferPart {
    Region(Region),
    Whole,
}

/// A tensor's place in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Region {
    pub fn of(t: Tensor) -> Region {
        Region { offset: t.offset, rows: t.rows, cols: t.cols, stride: t.stride }
    }

    fn end(&self) -> usize {
        if self.rows == 0 { self.offset } else { self.offset + (self.rows - 1) * self.stride + self.cols }
    }

    /// Whether it has all elements from its first to its last.
    fn is_dense(&self) -> bool {
        self.rows <= 1 || self.stride == self.cols
    }

    /// Its columns in rows of `stride`; `None` if they would wrap around.
    fn columns(&self, stride: usize) -> Option<std::ops::Range<usize>> {
        let from = self.offset % stride.max(1);
        ((self.rows <= 1 || self.stride == stride) && from + self.cols <= stride).then_some(from..from + self.cols)
    }

    /// Whether it has every element of `other`. May be false although it does.
    fn contains(&self, other: &Region) -> bool {
        let within = self.offset <= other.offset && other.end() <= self.end();
        let columns = || Some((self.columns(self.stride)?, other.columns(self.stride)?));
        within && (self.is_dense() || columns().is_some_and(|(own, its)| own.start <= its.start && its.end <= own.end))
    }

    /// Whether they have no element in common. May be false although they have none.
    fn is_disjoint(&self, other: &Region) -> bool {
        let stride = if self.rows > 1 { self.stride } else { other.stride };
        let columns = || Some((self.columns(stride)?, other.columns(stride)?));
        self.end() <= other.offset
            || other.end() <= self.offset
            || columns().is_some_and(|(own, its)| own.end <= its.start || its.end <= own.start)
    }
}

/// Where a buffer is up to date.
#[derive(Clone, Copy, Debug)]
pub struct BufferCoherence {
    /// Devices that have everything except `newer`.
    all: Devices,
    /// A region that is newer on one device, which is none of `all`.
    newer: Option<(Region, usize)>,
}

fn bit(device: usize) -> Devices {
    1 << device
}

impl BufferCoherence {
    /// Equal on `count` devices.
    pub fn everywhere(count: usize) -> BufferCoherence {
        BufferCoherence { all: if count >= 64 { Devices::MAX } else { bit(count) - 1 }, newer: None }
    }

    fn has_all(&self, device: usize) -> bool {
        self.all & bit(device) != 0
    }

    /// Any device that has everything except `newer`.
    fn any(&self) -> usize {
        self.all.trailing_zeros() as usize
    }

    /// Copies the newer region to a device of `all`, which is then the only one that has everything.
    fn settle(&mut self, transfers: &mut Vec<Transfer>) {
        if let Some((region, from)) = self.newer.take() {
            let to = self.any();
            transfers.push(Transfer { from, to, what: TransferPart::Region(region) });
            self.all = bit(to);
        }
    }

    /// `device` is about to read a region: adds the transfers that have to come before, in order.
    pub fn read(&mut self, device: usize, region: Region, transfers: &mut Vec<Transfer>) {
        if let Some((newer, at)) = self.newer {
            if (at == device && newer.contains(&region)) || (self.has_all(device) && newer.is_disjoint(&region)) {
                return;
            }
            if newer == region && !self.has_all(device) {
                transfers.push(Transfer { from: at, to: device, what: TransferPart::Region(region) });
                self.newer = Some((region, device));
                return;
            }
            self.settle(transfers);
        }
        if !self.has_all(device) {
            transfers.push(Transfer { from: self.any(), to: device, what: TransferPart::Region(region) });
            self.newer = Some((region, device));
        }
    }

    /// `device` is about to write a region: adds the transfers that have to come before, in order.
    pub fn write(&mut self, device: usize, region: Region, transfers: &mut Vec<Transfer>) {
        if let Some((newer, at)) = self.newer {
            let inside = at == device && newer.contains(&region);
            let over = region.contains(&newer);
            match (self.has_all(device), inside, over) {
                (false, true, _) => return,
                (false, false, true) => {
                    self.newer = Some((region, device));
                    return;
                }
                (true, _, true) => self.newer = None,
                (true, ..) if newer.is_disjoint(&region) => {}
                _ => self.settle(transfers),
            }
        } else if !self.has_all(device) {
            self.newer = Some((region, device));
            return;
        }
        if !self.has_all(device) {
            transfers.push(Transfer { from: self.any(), to: device, what: TransferPart::Whole });
        }
        self.all = bit(device);
    }

    /// Makes all copies equal: adds the transfers.
    pub fn make_equal(&mut self, count: usize, transfers: &mut Vec<Transfer>) {
        self.settle(transfers);
        let from = self.any();
        for to in (0..count).filter(|to| !self.has_all(*to)) {
            transfers.push(Transfer { from, to, what: TransferPart::Whole });
        }
        *self = BufferCoherence::everywhere(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 60;

    fn elements(region: &Region) -> impl Iterator<Item = usize> {
        let Region { offset, rows, cols, stride } = *region;
        (0..rows).flat_map(move |row| (0..cols).map(move |col| offset + row * stride + col))
    }

    /// A random part of the buffer.
    fn part(random: &mut fastrand::Rng) -> Region {
        let stride = [6, 10, 60][random.usize(..3)];
        let (from, to) = (random.usize(..SIZE / stride), random.usize(..=SIZE / stride));
        let (left, right) = (random.usize(..stride), random.usize(..=stride));
        let (rows, cols) = (to.saturating_sub(from).max(1), right.saturating_sub(left).max(1));
        Region { offset: from * stride + left, rows, cols, stride }
    }

    #[test]
    fn relations_of_regions_are_true() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut contained, mut apart) = (0, 0);
        for _ in 0..20_000 {
            let (a, b) = (part(&mut random), part(&mut random));
            let own: Vec<usize> = elements(&a).collect();
            if a.contains(&b) {
                contained += 1;
                assert!(elements(&b).all(|at| own.contains(&at)), "{a:?} {b:?}");
            }
            if a.is_disjoint(&b) {
                apart += 1;
                assert!(elements(&b).all(|at| !own.contains(&at)), "{a:?} {b:?}");
            }
        }
        assert!(contained > 500 && apart > 5000, "{contained} {apart}");
    }

    #[test]
    fn readers_see_the_last_write() {
        let mut random = fastrand::Rng::with_seed(4);
        for devices in [1, 2, 3] {
            for _ in 0..400 {
                let mut held = BufferCoherence::everywhere(devices);
                let mut on = vec![vec![0u32; SIZE]; devices];
                let mut truth = vec![0u32; SIZE];
                for time in 1..60 {
                    let mut transfers = Vec::new();
                    let device = random.usize(..devices);
                    // An operation may read and write parts of the same buffer.
                    let reads: Vec<Region> = (0..random.usize(..3)).map(|_| part(&mut random)).collect();
                    let writes: Vec<Region> = (0..random.usize(..3)).map(|_| part(&mut random)).collect();
                    let make_equal = random.u8(..20) == 0;
                    if make_equal {
                        held.make_equal(devices, &mut transfers);
                    }
                    reads.iter().for_each(|region| held.read(device, *region, &mut transfers));
                    writes.iter().for_each(|region| held.write(device, *region, &mut transfers));
                    for Transfer { from, to, what } in transfers {
                        let whole = Region { offset: 0, rows: 1, cols: SIZE, stride: SIZE };
                        let region = if let TransferPart::Region(region) = what { region } else { whole };
                        for at in elements(&region) {
                            on[to][at] = on[from][at];
                        }
                    }
                    for at in reads.iter().flat_map(elements) {
                        assert_eq!(on[device][at], truth[at], "{held:?}");
                    }
                    for at in writes.iter().flat_map(elements) {
                        on[device][at] = time;
                        truth[at] = time;
                    }
                }
            }
        }
    }
}
