// Register budgets of warpgroups (setmaxnreg), and the dependency between launches (griddepcontrol).
#include <algorithm>
#include <string>
#include <vector>

#include "engine.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

constexpr int FILE_REGISTERS = 65536;  // of a multiprocessor
constexpr int FEWEST = 24;
constexpr int MOST = 256;
constexpr int STEP = 8;
constexpr int GROUP_WARPS = 4;

// The registers of a block's warps. A block gets at its launch what __launch_bounds__ lets ptxas give a kernel that
// sets budgets: the register file divided by its threads, in steps of 8. What one warp gives up another may take.
class Registers {
   public:
    explicit Registers(Engine& engine);

    void set(int registers, bool is_raise, Site site);

   private:
    static void perform(Engine& engine, int first_thread, void* const* lanes);
    static void check_end(Engine& engine);
    void check_group(int warp, Site site);

    struct WarpBudget {
        int registers;
        std::vector<int> requests;  // all so far
        Site site;
    };

    Engine& engine_;
    int free_ = 0;  // of one thread of each lane: 32 registers
    std::vector<WarpBudget> warps_;
    std::vector<int> waiting_;  // threads
};

struct Request {
    int registers;
    bool is_raise;
    Site site;
};

Registers::Registers(Engine& engine) : engine_(engine) {
    const int start = std::min(MOST, FILE_REGISTERS / engine.threads() / STEP * STEP);
    warps_.assign(static_cast<size_t>(engine.threads() / WARP), {start, {}, {}});
    engine.at_block_end.push_back(check_end);
}

void Registers::perform(Engine& engine, int first_thread, void* const* lanes) {
    const Request& request = *static_cast<Request*>(lanes[0]);
    Registers& own = engine.state<Registers>();
    WarpBudget& warp = own.warps_[static_cast<size_t>(first_thread / WARP)];
    const int change = request.registers - warp.registers;
    const bool is_wrong_way = request.is_raise ? change < 0 : change > 0;
    if (is_wrong_way || request.registers < FEWEST || request.registers > MOST || request.registers % STEP) {
        engine.fail("bad_registers", request.site,
                    std::string(request.is_raise ? "raising" : "lowering") + " a thread's registers from " +
                        std::to_string(warp.registers) + " to " + std::to_string(request.registers) +
                        " at " + place(request.site) + ": budgets are multiples of 8 from 24 to 256");
    }
    warp.requests.push_back(request.registers);
    warp.site = request.site;
    own.check_group(first_thread / WARP, request.site);
    if (request.is_raise) return;  // each lane sees whether there are enough
    own.free_ += warp.registers - request.registers;
    warp.registers = request.registers;
    for (int thread : own.waiting_) engine.wake(thread);
    own.waiting_.clear();
}

// All warps of a warpgroup ask for the same.
void Registers::check_group(int warp, Site site) {
    const WarpBudget& own = warps_[static_cast<size_t>(warp)];
    const size_t index = own.requests.size() - 1;
    const size_t first = static_cast<size_t>(warp / GROUP_WARPS * GROUP_WARPS);
    for (size_t other = first; other < std::min(first + GROUP_WARPS, warps_.size()); ++other) {
        const WarpBudget& its = warps_[other];
        if (its.requests.size() <= index || its.requests[index] == own.requests[index]) continue;
        engine_.fail("divergence", site,
                     "warp " + std::to_string(warp) + " asks at " + place(site) + " for " +
                         std::to_string(own.requests[index]) + " registers a thread, and warp " +
                         std::to_string(other) + " of its warpgroup asked for " +
                         std::to_string(its.requests[index]) + " at " + place(its.site));
    }
}

void Registers::check_end(Engine& engine) {
    const std::vector<WarpBudget>& warps = engine.state<Registers>().warps_;
    for (size_t warp = 0; warp < warps.size(); ++warp) {
        const WarpBudget& first = warps[warp / GROUP_WARPS * GROUP_WARPS];
        if (warps[warp].requests.size() == first.requests.size()) continue;
        const Site site = first.requests.empty() ? warps[warp].site : first.site;
        engine.fail("divergence", static_cast<int>(warp) * WARP, site,
                    "not all warps of the warpgroup of warp " + std::to_string(warp) +
                        " have set their registers at " + place(site));
    }
}

void Registers::set(int registers, bool is_raise, Site site) {
    Request request{registers, is_raise, site};
    engine_.meet(is_raise ? "raise_registers" : "lower_registers", site, &request, perform);
    if (!is_raise) return;
    WarpBudget& warp = warps_[static_cast<size_t>(engine_.current().thread / WARP)];
    while (warp.registers != registers && free_ < registers - warp.registers) {
        waiting_.push_back(engine_.current().thread);
        engine_.wait("raise_registers: too few are free", site);
    }
    free_ -= registers - warp.registers;  // the first lane takes them for its warp
    warp.registers = registers;
}

}  // namespace

void set_registers(int registers, bool is_raise, int line) {
    engine().state<Registers>().set(registers, is_raise, EMULATOR_SITE(line));
}

void wait_for_predecessor() { engine().current().clock[static_cast<size_t>(engine().predecessor())] = 1; }

int grid_size() { return static_cast<int>(engine().launch().grid); }

}  // namespace emulator
