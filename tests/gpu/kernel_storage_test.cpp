// Records, archive and disk cache: what they hold comes back, and whatever is wrong with them is
// seen before a byte of it is run.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "gpu/runtime/disk_cache.hpp"
#include "gpu/runtime/kernel_archive.hpp"
#include "gpu/runtime/kernel_image.hpp"
#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

KernelImage make_image(const std::string& identity, const std::string& code = "machine code") {
  KernelImage image;
  image.identity = identity;
  image.compiler = "13.0";
  image.resources = {.registers = 168,
                     .spill_store_bytes = 4,
                     .spill_load_bytes = 8,
                     .stack_bytes = 16,
                     .static_shared_bytes = 32,
                     .barriers = 2,
                     .advisories = 1};
  image.log = "a log\n";
  image.cubin.assign(code.begin(), code.end());
  return image;
}

void expect_same(const KernelImage& a, const KernelImage& b) {
  EXPECT_EQ(a.identity, b.identity);
  EXPECT_EQ(a.compiler, b.compiler);
  EXPECT_EQ(a.resources, b.resources);
  EXPECT_EQ(a.log, b.log);
  EXPECT_EQ(a.cubin, b.cubin);
}

// ---- records

TEST(Record, RoundTrip) {
  const KernelImage image = make_image("a kernel\n", std::string("\0\xff\n code", 8));
  KernelImage read;
  EXPECT_EQ(read_record(write_record(image), read), "");
  expect_same(read, image);
}

TEST(Record, EveryTruncationIsSeen) {
  const std::string record = write_record(make_image("a kernel\n"));
  for (std::size_t size = 0; size < record.size(); ++size) {
    KernelImage read;
    EXPECT_NE(read_record(record.substr(0, size), read), "") << size;
  }
  KernelImage read;
  EXPECT_NE(read_record(record + "x", read), "");
}

TEST(Record, EveryFlippedBitIsSeen) {
  const std::string record = write_record(make_image("a kernel\n"));
  for (std::size_t i = 0; i < record.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = record;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      KernelImage read;
      EXPECT_NE(read_record(damaged, read), "") << i << " bit " << bit;
    }
  }
}

TEST(Record, WithoutMachineCodeIsRefused) {
  KernelImage read;
  EXPECT_EQ(read_record(write_record(make_image("a kernel\n", "")), read),
            "it holds no machine code");
}

// ---- archive

std::string write_test_archive(const TempDir& dir, int count) {
  std::vector<KernelImage> images;
  for (int i = 0; i < count; ++i) {
    images.push_back(make_image("kernel " + std::to_string(i), "code " + std::to_string(i)));
  }
  const std::string path = dir.file(kArchiveFileName);
  write_archive(path, images);
  return path;
}

TEST(Archive, FindsWhatItHoldsAndNothingElse) {
  const TempDir dir;
  KernelArchive archive;
  ASSERT_EQ(archive.open(write_test_archive(dir, 37)), "");
  EXPECT_EQ(archive.count(), 37u);
  for (int i = 0; i < 37; ++i) {
    KernelImage image;
    std::string problem;
    const std::string identity = "kernel " + std::to_string(i);
    EXPECT_TRUE(archive.contains(identity));
    ASSERT_TRUE(archive.find(identity, image, problem)) << problem;
    expect_same(image, make_image(identity, "code " + std::to_string(i)));
  }
  KernelImage image;
  std::string problem;
  EXPECT_FALSE(archive.contains("kernel 37"));
  EXPECT_FALSE(archive.find("kernel 37", image, problem));
  EXPECT_EQ(problem, "");
  EXPECT_EQ(names_in(dir.path()), std::vector<std::string>{kArchiveFileName});
}

TEST(Archive, EmptyOrMissing) {
  const TempDir dir;
  KernelArchive empty;
  EXPECT_EQ(empty.open(write_test_archive(dir, 0)), "");
  EXPECT_FALSE(empty.contains("kernel 0"));
  KernelArchive missing;
  EXPECT_TRUE(contains(missing.open(dir.file("none")), "No such file"));
  EXPECT_FALSE(missing.contains("kernel 0"));
  KernelArchive folder;
  EXPECT_NE(folder.open(dir.path()), "");
}

TEST(Archive, TruncationIsSeen) {
  const TempDir dir;
  const std::string bytes = read_all(write_test_archive(dir, 3));
  for (std::size_t size = 0; size < bytes.size(); size += size < 64 ? 1 : 7) {
    write_all(dir.file("cut"), bytes.substr(0, size));
    KernelArchive archive;
    EXPECT_NE(archive.open(dir.file("cut")), "") << size;
    EXPECT_FALSE(archive.contains("kernel 1"));
  }
}

// A flipped byte makes the whole archive or one record unusable; it never changes what is found.
TEST(Archive, FlippedBitsAreSeen) {
  const TempDir dir;
  const std::string bytes = read_all(write_test_archive(dir, 3));
  for (std::size_t i = 0; i < bytes.size(); i += i < 64 ? 1 : 7) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    write_all(dir.file("damaged"), damaged);
    KernelArchive archive;
    int lost = archive.open(dir.file("damaged")) == "" ? 0 : 3;
    for (int k = 0; k < 3 && lost < 3; ++k) {
      KernelImage image;
      std::string problem;
      const std::string identity = "kernel " + std::to_string(k);
      if (archive.find(identity, image, problem)) {
        expect_same(image, make_image(identity, "code " + std::to_string(k)));
      } else {
        EXPECT_NE(problem, "") << i;
        ++lost;
      }
    }
    EXPECT_GE(lost, 1) << i;
  }
}

TEST(Archive, UnwritablePlace) {
  const Thrown thrown = thrown_by([] { write_archive("/no/such/folder/a.bin", {}); });
  EXPECT_EQ(thrown.code, ONCHIP_INTERNAL);
  EXPECT_TRUE(contains(thrown.text, "/no/such/folder")) << thrown.text;
}

// ---- disk cache

struct Cache {
  explicit Cache(const TempDir& dir) : directory(dir.file("cache")) {}
  std::string entry(const std::string& identity = "a kernel\n") const {
    return directory + "/" + DiskCache::entry_name(identity, "13.0");
  }
  void store(const KernelImage& image) const {
    DiskCache cache(directory);
    cache.store(image);
    ASSERT_EQ(cache.problem(), "");
  }
  // "found", or why not.
  std::string find(const std::string& identity = "a kernel\n") const {
    DiskCache cache(directory);
    KernelImage image;
    if (cache.find(identity, "13.0", image)) {
      expect_same(image, make_image(identity));
      return "found";
    }
    return cache.problem();
  }
  std::string directory;
};

TEST(DiskCache, KeepsAnImageInAPrivateFolder) {
  const TempDir dir;
  const std::string directory = dir.file("new/folders/cache");
  DiskCache cache(directory);
  KernelImage image;
  EXPECT_FALSE(cache.find("a kernel\n", "13.0", image));
  EXPECT_EQ(cache.problem(), "") << "an empty cache is no problem";
  cache.store(make_image("a kernel\n"));
  EXPECT_EQ(cache.problem(), "");
  ASSERT_TRUE(cache.find("a kernel\n", "13.0", image));
  expect_same(image, make_image("a kernel\n"));
  EXPECT_FALSE(cache.find("a kernel\n", "13.1", image)) << "another compiler";
  EXPECT_FALSE(cache.find("another kernel\n", "13.0", image));

  struct stat status{};
  ASSERT_EQ(stat(directory.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  ASSERT_EQ(stat((directory + "/" + DiskCache::entry_name("a kernel\n", "13.0")).c_str(), &status),
            0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(names_in(directory).size(), 1u) << "no temporary file is left";
}

TEST(DiskCache, OffKeepsNothing) {
  DiskCache cache("", "why it is off");
  KernelImage image;
  cache.store(make_image("a kernel\n"));
  EXPECT_FALSE(cache.find("a kernel\n", "13.0", image));
  EXPECT_EQ(cache.problem(), "why it is off");
}

TEST(DiskCache, TruncatedAndDamagedEntries) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  const std::string bytes = read_all(cache.entry());
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, bytes.size() - 1}) {
    write_all(cache.entry(), bytes.substr(0, size));
    EXPECT_TRUE(contains(cache.find(), "is not used")) << size;
  }
  std::string damaged = bytes;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  write_all(cache.entry(), damaged);
  EXPECT_TRUE(contains(cache.find(), "its content does not match its hash")) << cache.find();

  cache.store(make_image("a kernel\n"));
  EXPECT_EQ(cache.find(), "found") << "a bad entry is replaced";
}

TEST(DiskCache, AnEntryOfSomethingElseUnderThisName) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("another kernel\n"));
  ASSERT_EQ(rename(cache.entry("another kernel\n").c_str(), cache.entry().c_str()), 0);
  EXPECT_TRUE(contains(cache.find(), "it was made for something else")) << cache.find();
}

TEST(DiskCache, EntriesThatOthersCouldHaveWritten) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  for (const mode_t mode : {0620u, 0602u, 0666u}) {
    ASSERT_EQ(chmod(cache.entry().c_str(), mode), 0);
    EXPECT_TRUE(contains(cache.find(), "other users may write it")) << mode;
  }
  ASSERT_EQ(chmod(cache.entry().c_str(), 0644), 0);
  EXPECT_EQ(cache.find(), "found") << "reading is harmless";
}

TEST(DiskCache, FoldersThatOthersCouldHaveWritten) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  ASSERT_EQ(chmod(cache.directory.c_str(), 01777), 0);
  EXPECT_TRUE(contains(cache.find(), "is not used: other users may write it")) << cache.find();
  DiskCache writer(cache.directory);
  writer.store(make_image("another kernel\n"));
  EXPECT_TRUE(contains(writer.problem(), "other users may write it"));
  EXPECT_EQ(names_in(cache.directory).size(), 1u);
}

TEST(DiskCache, EntriesAndFoldersOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make files of another user";
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  ASSERT_EQ(chown(cache.entry().c_str(), 12345, 12345), 0);
  EXPECT_TRUE(contains(cache.find(), "it belongs to user 12345, not to user 0")) << cache.find();
  ASSERT_EQ(chown(cache.entry().c_str(), 0, 0), 0);
  ASSERT_EQ(chown(cache.directory.c_str(), 12345, 12345), 0);
  EXPECT_TRUE(contains(cache.find(), "it belongs to user 12345")) << cache.find();
}

TEST(DiskCache, WhatIsNoRegularFile) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  const std::string elsewhere = dir.file("elsewhere");
  ASSERT_EQ(rename(cache.entry().c_str(), elsewhere.c_str()), 0);
  ASSERT_EQ(symlink(elsewhere.c_str(), cache.entry().c_str()), 0);
  EXPECT_TRUE(contains(cache.find(), "is not used")) << "a link: " << cache.find();
  ASSERT_EQ(unlink(cache.entry().c_str()), 0);
  ASSERT_EQ(mkfifo(cache.entry().c_str(), 0600), 0);
  EXPECT_TRUE(contains(cache.find(), "it is no regular file")) << "a pipe: " << cache.find();
  ASSERT_EQ(unlink(cache.entry().c_str()), 0);
  ASSERT_EQ(mkdir(cache.entry().c_str(), 0700), 0);
  EXPECT_TRUE(contains(cache.find(), "it is no regular file")) << "a folder: " << cache.find();
}

TEST(DiskCache, AFileWhereTheFolderShouldBe) {
  const TempDir dir;
  write_all(dir.file("cache"), "");
  DiskCache cache(dir.file("cache"));
  cache.store(make_image("a kernel\n"));
  EXPECT_TRUE(contains(cache.problem(), "Not a directory")) << cache.problem();
  DiskCache below(dir.file("cache/deeper"));
  below.store(make_image("a kernel\n"));
  EXPECT_TRUE(contains(below.problem(), "Not a directory")) << below.problem();
}

// What a user without any right to the folder sees.
TEST(DiskCache, ReadOnlyFolder) {
  const TempDir dir;
  const Cache cache(dir);
  cache.store(make_image("a kernel\n"));
  ASSERT_EQ(chmod(dir.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(cache.directory.c_str(), 0555), 0);
  ASSERT_EQ(chmod(cache.entry().c_str(), 0444), 0);
  const std::string answer = in_child([&]() -> std::string {
    // Root may write anywhere; its files are trusted by all.
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) return "setresuid fails";
    DiskCache reader(cache.directory);
    KernelImage image;
    if (!reader.find("a kernel\n", "13.0", image)) return "not found: " + reader.problem();
    reader.store(make_image("another kernel\n"));
    return reader.problem();
  });
  EXPECT_TRUE(contains(answer, "cannot write the kernel cache")) << answer;
  EXPECT_TRUE(contains(answer, "Permission denied")) << answer;
  ASSERT_EQ(chmod(cache.directory.c_str(), 0700), 0);
  EXPECT_EQ(names_in(cache.directory).size(), 1u);
}

TEST(DiskCache, FileSizeLimitDoesNotKillTheProcess) {
  const TempDir dir;
  const Cache cache(dir);
  const std::string answer = in_child([&] {
    const rlimit limit{16, 16};
    setrlimit(RLIMIT_FSIZE, &limit);
    DiskCache writer(cache.directory);
    writer.store(make_image("a kernel\n"));
    return writer.problem();
  });
  EXPECT_TRUE(contains(answer, "file size limit is 16 bytes")) << answer;
  EXPECT_TRUE(names_in(cache.directory).empty());
}

TEST(DiskCache, FullDisk) {
  const TempDir dir;
  const std::string answer = in_child([&]() -> std::string {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=16k,mode=0700") != 0) {
      return "skip: " + std::string(std::strerror(errno));
    }
    DiskCache writer(dir.path());
    writer.store(make_image("a kernel\n", std::string(100000, 'x')));
    return writer.problem() + ", left: " + std::to_string(names_in(dir.path()).size());
  });
  if (answer.starts_with("skip")) GTEST_SKIP() << "no file system of a chosen size: " << answer;
  EXPECT_TRUE(contains(answer, "No space left on device")) << answer;
  EXPECT_TRUE(contains(answer, "left: 0")) << answer;
}

}  // namespace
}  // namespace onchip::gpu::test
