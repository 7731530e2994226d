//! Files that change, shrink or vanish while they are read.

use super::*;

#[test]
fn a_file_that_is_truncated_after_it_was_opened_is_named_with_tensor_and_offset() {
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        let folder = folder_of(&[vec![5 << 20, 3 << 20]]);
        let path = files(folder.path()).remove(0);
        make_cold(folder.path());
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(6 << 20).unwrap();
        start(&checkpoint, &loading);
        let error = loading.finish().unwrap_err().to_string();
        for part in [path.to_str().unwrap(), "truncated", "\"0.1\"", "offset 6291456"] {
            assert!(error.contains(part), "{mode:?}: {part:?} is not in: {error}");
        }
        // Whoever still looks finds zeros and no signal, and the same error afterwards.
        let tensor = checkpoint.tensor("0.1").unwrap().bytes;
        assert_eq!(tensor[tensor.len() - 1], 0);
        assert_eq!(loading.check().unwrap_err().to_string(), error);
    }
}

#[test]
fn what_cannot_be_delivered_is_an_error_that_names_it() {
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        let folder = folder_of(&[vec![5 << 20, 3 << 20]]);
        let path = files(folder.path()).remove(0);
        make_cold(folder.path());
        // 1. A file that is shorter than it was
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(6 << 20).unwrap();
        deliver((&views, &[]), &loading, || Ok(()));
        let error = loading.finish().unwrap_err().to_string();
        for part in [path.to_str().unwrap(), "truncated", "\"0.1\"", "offset 6291456"] {
            assert!(error.contains(part), "{mode:?}: {part:?} is not in: {error}");
        }
        assert_eq!(loading.check().unwrap_err().to_string(), error);
        // 2. Whoever takes it cannot
        let folder = folder_of(&[vec![5 << 20, 3 << 20]]);
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
        deliver((&views, &[]), &loading, || Err(io::Error::other("the device is gone")));
        let error = loading.finish().unwrap_err().to_string();
        assert!(error.contains("the device is gone") && error.contains(".safetensors"), "{mode:?}: {error}");
        // 3. It is given up
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
        deliver((&views, &[]), &loading, || Ok(()));
        drop(loading);
    }
}

#[test]
fn what_was_delivered_is_not_here_and_may_change_on_disk() {
    let folder = folder_of(&[vec![80 << 20]]);
    let path = files(folder.path()).remove(0);
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
        let taken = Arc::new(Mutex::new(0));
        let count = Arc::clone(&taken);
        let take = move |pieces: &[Piece]| {
            *count.lock().unwrap() += pieces.iter().map(|piece| piece.bytes.len()).sum::<usize>();
            Ok(())
        };
        loading.deliver(&views, &[], &mut host_memory, take).unwrap();
        loading.finish().unwrap();
        assert_eq!(*taken.lock().unwrap(), 80 << 20);
        assert!(views.iter().all(|view| !view.is_ready()), "{mode:?}: a copy of it stayed here");
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[1], 40 << 20).unwrap();
        loading.check().unwrap();
    }
}

#[test]
fn a_map_whose_file_shrinks_in_use_reads_zeros_and_is_marked() {
    let folder = folder_of(&[vec![5 << 20, 3 << 20], vec![100]]);
    let path = files(folder.path()).remove(0);
    let (checkpoint, loading) = load::open(folder.path(), &options(LoadMode::Mmap)).unwrap();
    start(&checkpoint, &loading);
    loading.finish().unwrap();
    let last = |name: &str| *checkpoint.tensor(name).unwrap().bytes.last().unwrap();
    let other = last("1.0");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert_eq!(last("0.1"), 0);
    let error = loading.check().unwrap_err().to_string();
    assert!(error.contains("truncated") && error.contains("\"0.0\" at offset 4096"), "{error}");
    assert_eq!(last("1.0"), other);
}

#[test]
fn a_file_that_is_replaced_or_written_to_while_it_is_read_is_an_error() {
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        for replace in [true, false] {
            let folder = folder_of(&[vec![3 << 20]]);
            let path = files(folder.path()).remove(0);
            make_cold(folder.path());
            let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
            if replace {
                let other = folder.path().join("other");
                fs::copy(&path, &other).unwrap();
                fs::rename(&other, &path).unwrap();
            } else {
                OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[1], 3 << 20).unwrap();
            }
            start(&checkpoint, &loading);
            let error = loading.finish().unwrap_err().to_string();
            assert!(error.contains("replaced") && error.contains(path.to_str().unwrap()), "{mode:?}: {error}");
        }
    }
}
