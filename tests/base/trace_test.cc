#include "fulgur/base/trace.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace fulgur::trace {
namespace {

// The spans that ended since the one called `mark`.
std::vector<RecentSpan> since(const std::string& mark) {
  std::vector<RecentSpan> spans = recent_spans();
  for (size_t i = spans.size(); i > 0; --i) {
    if (spans[i - 1].name == mark) return {spans.begin() + static_cast<std::ptrdiff_t>(i), spans.end()};
  }
  ADD_FAILURE() << "no span is called " << mark;
  return {};
}

TEST(RecentSpans, AreKeptInTheOrderOfTheirEnds) {
  const ScopedRecentSpans keeps;
  {
    const Span mark("order");
  }
  {
    const Span outer("outer");
    {
      const Span inner("inner");
    }
  }
  const auto spans = since("order");
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].name, "inner");
  EXPECT_EQ(spans[1].name, "outer");
  EXPECT_LE(spans[0].seconds, spans[1].seconds);
  EXPECT_GE(spans[0].ended_s, spans[1].ended_s);
  EXPECT_GE(spans[1].ended_s, 0.0);
  EXPECT_EQ(spans[0].thread, spans[1].thread);
}

TEST(RecentSpans, TimesAreThoseOfTheClock) {
  const ScopedRecentSpans keeps;
  const auto begin = Clock::now();
  {
    const Span span("clock");
    while (Clock::now() - begin < std::chrono::milliseconds(20)) {
    }
  }
  const std::chrono::duration<double> at_most = Clock::now() - begin;
  const RecentSpan last = recent_spans().back();
  EXPECT_EQ(last.name, "clock");
  EXPECT_GT(last.seconds, 0.019);
  EXPECT_LT(last.seconds, at_most.count() * 1.05 + 1e-3);
}

TEST(RecentSpans, AreNotKeptWithoutAScope) {
  {
    const ScopedRecentSpans keeps;
    {
      const Span mark("scope");
    }
  }
  {
    const Span unseen("unseen");
  }
  EXPECT_TRUE(since("scope").empty());
}

TEST(RecentSpans, OnlyTheLastAreKept) {
  const ScopedRecentSpans keeps;
  for (size_t i = 0; i < 3 * kMostRecentSpans; ++i) {
    const std::string name = "span " + std::to_string(i);
    const Span span(name);
  }
  const auto spans = recent_spans();
  ASSERT_EQ(spans.size(), kMostRecentSpans);
  EXPECT_EQ(spans.front().name, "span " + std::to_string(2 * kMostRecentSpans));
  EXPECT_EQ(spans.back().name, "span " + std::to_string(3 * kMostRecentSpans - 1));
}

TEST(RecentSpans, ALongNameIsCut) {
  const ScopedRecentSpans keeps;
  const std::string name(RecentSpan::kMostNameBytes + 10, 'x');
  {
    const Span span(name);
  }
  EXPECT_EQ(recent_spans().back().name, std::string(RecentSpan::kMostNameBytes, 'x'));
}

TEST(RecentSpans, ThreadsHaveNumbersOfTheirOwn) {
  const ScopedRecentSpans keeps;
  {
    const Span span("here");
  }
  const int64_t here = recent_spans().back().thread;
  std::thread([] { const Span span("there"); }).join();
  EXPECT_EQ(recent_spans().back().name, "there");
  EXPECT_NE(recent_spans().back().thread, here);
}

}  // namespace
}  // namespace fulgur::trace
